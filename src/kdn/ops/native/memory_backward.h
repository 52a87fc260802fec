// The memory's backward pass, chunk by chunk from the last; memory.h has the equations, panels.h the steps.
#pragma once
#include <vector>

#include "panels.h"

namespace KDN_NAMESPACE {

// From the gradients of four tokens' factors to those of log α, q, k and gain, four rows each, in `to`. Nothing is
// subtracted in ∂ log α but true signs, so that it keeps its digits at any decay.
KDN_INLINE void finish(float* to, const Tokens& x, FactorGradients g, float scale, bool keys) {
  const int64_t n = g.width;
  const float *da = g.pairs(), *dk = g.row(0, 0), *dq = g.row(1, 0), *dg = g.row(2, 0);
  const Vec tau = splat(scale);
  for (int64_t i = 0; i < n; i += L) {
    Vec a[4], q[4], k[4], w[4];
    KDN_UNROLL
    for (int c = 0; c < 4; ++c) {
      a[c] = load(x.alpha[c] + i);
      q[c] = load(x.q[c] + i) * tau;
      k[c] = keys ? load(x.k[c] + i) : Vec{};
      w[c] = load(x.g[c] + i);
    }
    Vec log[4], out_q[4], out_k[4], out_g[4], prefix[4], suffix[4];
    prefix[0] = a[0];
    suffix[3] = splat(1.f);
    KDN_UNROLL
    for (int c = 1; c < 4; ++c) prefix[c] = prefix[c - 1] * a[c];
    KDN_UNROLL
    for (int c = 2; c >= 0; --c) suffix[c] = suffix[c + 1] * a[c + 1];
    const Vec all = prefix[3] * load(g.decay() + i);
    KDN_UNROLL
    for (int t = 0; t < 4; ++t) log[t] = all;
    KDN_UNROLL
    for (int c = 0; c < 4; ++c) {
      const Vec dq_c = load(dq + c * n + i) * prefix[c];
      const Vec dk_c = keys ? -(load(dk + c * n + i) * prefix[c]) : Vec{};  // the kernels summed +∂Y Sᵀ
      const Vec dg_c = load(dg + c * n + i) * suffix[c];
      const Vec early = q[c] * dq_c + k[c] * dk_c, late = w[c] * dg_c;
      KDN_UNROLL
      for (int t = 0; t <= c; ++t) log[t] += early;
      KDN_UNROLL
      for (int t = c + 1; t < 4; ++t) log[t] += late;
      out_q[c] = dq_c;
      out_k[c] = dk_c;
      out_g[c] = dg_c;
    }
    KDN_UNROLL
    for (int d = 0; d < 4; ++d) {
      const Vec own = splat(da[a_at(d, d)]);
      out_q[d] += own * w[d];
      out_g[d] += own * q[d];
      Vec between = splat(1.f);
      KDN_UNROLL
      for (int c = d + 1; c < 4; ++c) {
        between = between * a[c];
        const Vec d_a = splat(da[a_at(c, d)]), d_t = splat(da[t_at(c, d)]);
        const Vec g_late = w[d] * between;
        const Vec reader = d_a * q[c] + d_t * k[c];
        out_q[c] += d_a * g_late;
        out_k[c] += d_t * g_late;
        out_g[d] += reader * between;
        const Vec pair = reader * g_late;
        KDN_UNROLL
        for (int t = d + 1; t <= c; ++t) log[t] += pair;
      }
    }
    KDN_UNROLL
    for (int c = 0; c < 4; ++c) {
      store(to + c * n + i, log[c]);
      store(to + (4 + c) * n + i, out_q[c] * tau);
      store(to + (8 + c) * n + i, out_k[c]);
      store(to + (12 + c) * n + i, out_g[c]);
    }
  }
}

KDN_INLINE void store_if(const KdnRows& x, const Where& w, int64_t t, const float* from) {
  if (x.data != nullptr) store_row(x, offset(x, w.batch, t, w.head), from);
}

// Room for one task's work on a chunk.
struct BackwardRoom {
  float *states, *factors, *tokens, *results, *values, *d_out, *d_v, *r, *o, *y;

  static constexpr int64_t block = WIDE * L;
  static int64_t size(int64_t n, int64_t columns) {
    return TILE * n * block + TILE * Factors::size(n) + 2 * Tokens::size(n) +
           3 * CHUNK * columns + 3 * CHUNK * block;
  }
  BackwardRoom(float* at, int64_t n, int64_t columns) {
    auto take = [&](int64_t count) {
      float* here = at;
      at += count;
      return here;
    };
    states = take(TILE * n * block);
    factors = take(TILE * Factors::size(n));
    tokens = take(Tokens::size(n));
    results = take(Tokens::size(n));
    values = take(CHUNK * columns);
    d_out = take(CHUNK * columns);
    d_v = take(CHUNK * columns);
    r = take(CHUNK * block);
    o = take(CHUNK * block);
    y = take(CHUNK * block);
  }
};

KDN_INLINE int64_t chunk_count(const Where& w) { return (w.end - w.begin + CHUNK - 1) / CHUNK; }

KDN_INLINE void chunk_factors(const Where& w, int64_t t, int64_t minis, const BackwardRoom& room) {
  for (int64_t i = 0; i < minis; ++i)
    make_factors(Factors{room.factors + i * Factors::size(w.width), w.width},
                 load_tokens(room.tokens, w, t + i * MINI), w.m.scale);
}

// One chunk of the columns [first, last): ∂S (at `ds`, from column `first`) to the chunk's start, ∂V, and the
// factors' gradients added to gradients(column), which must be zero at first. Meanwhile asks for the rows of
// `next`.
template <typename Gradients>
void back_columns(const Where& w, int64_t chunk, int64_t first, int64_t last, float* ds,
                  const BackwardRoom& room, const Where& next, int64_t next_chunk, Gradients&& gradients) {
  const KdnMemory& m = w.m;
  const int64_t n = w.width, columns = w.columns, t = w.begin + chunk * CHUNK;
  const int64_t count = t + CHUNK < w.end ? CHUNK : w.end - t, minis = (count + MINI - 1) / MINI;
  chunk_factors(w, t, minis, room);
  for (int64_t i = 0; i < minis * MINI; ++i) {
    float *v = room.values + i * columns, *d = room.d_out + i * columns;
    if (i < count)
      load_row(v, m.v, offset(m.v, w.batch, t + i, w.head), columns);
    else
      std::memset(v, 0, columns * 4);
    if (i < count && m.d_out.data)
      load_row(d, m.d_out, offset(m.d_out, w.batch, t + i, w.head), columns);
    else
      std::memset(d, 0, columns * 4);
  }
  blocks(first, last, [&](auto width, int64_t at) {
    constexpr int N = decltype(width)::value;
    constexpr int64_t span = N * L;
    const int64_t size = n * span;
    load_panels(room.states, m.checkpoints + w.checkpoint(chunk), w, at, N);
    for (int64_t i = 0; i < minis; ++i) {
      const Factors f{room.factors + i * Factors::size(n), n};
      float* next = i + 1 < minis ? room.states + (i + 1) * size : nullptr;
      const float *s = room.states + i * size, *v = room.values + i * MINI * columns + at;
      if (m.k.data)
        replay<N, true>(next, s, f, v, columns, room.r + i * MINI * span);
      else
        replay<N, false>(next, s, f, v, columns, room.r + i * MINI * span);
      for (int c = 0; c < MINI; ++c)
        std::memcpy(room.o + (i * MINI + c) * span, room.d_out + (i * MINI + c) * columns + at,
                    span * 4);
    }
    float* d = ds + (at - first) * n;
    const Fetch later{next, next_chunk, (at - first) / (WIDE * L), (last - first + WIDE * L - 1) / (WIDE * L)};
    for (int64_t i = minis - 1; i >= 0; --i) {
      later.tokens(i, [&](int64_t t) {
        later.inputs(t);
        fetch_row(m.d_out, next, t);
        for (const KdnRows* out : {&m.d_q, &m.d_k, &m.d_v, &m.d_gain, &m.d_decay}) fetch_row(*out, next, t);
      });
      const Factors f{room.factors + i * Factors::size(n), n};
      const FactorGradients g{gradients(at) + i * FactorGradients::size(n), n};
      const float *s = room.states + i * size, *o = room.o + i * MINI * span;
      const float* r = room.r + i * MINI * span;
      float* y = room.y + i * MINI * span;
      if (m.k.data)
        step_back<N, true>(d, s, f, g, o, r, y);
      else
        step_back<N, false>(d, s, f, g, o, r, y);
      for (int c = 0; c < MINI; ++c)
        std::memcpy(room.d_v + (i * MINI + c) * columns + at, y + c * span, span * 4);
    }
  });
  if (m.d_v.data == nullptr) return;
  KdnRows part = m.d_v;
  part.channels = (int32_t)((last < m.value ? last : m.value) - first);
  for (int64_t i = 0; i < count; ++i)
    store_row(part, offset(m.d_v, w.batch, t + i, w.head) + first, room.d_v + i * columns + first);
}

// One chunk's ∂q, ∂k, ∂gain and ∂ log α from its factors' gradients.
inline void back_rows(const Where& w, int64_t chunk, const BackwardRoom& room, float* gradients) {
  const KdnMemory& m = w.m;
  const int64_t n = w.width, t = w.begin + chunk * CHUNK;
  const int64_t count = t + CHUNK < w.end ? CHUNK : w.end - t, minis = (count + MINI - 1) / MINI;
  for (int64_t i = 0; i < minis; ++i) {
    const Tokens x = load_tokens(room.tokens, w, t + i * MINI);
    const float* result = room.results;
    finish(room.results, x, FactorGradients{gradients + i * FactorGradients::size(n), n}, m.scale,
           m.k.data != nullptr);
    for (int c = 0; c < MINI && i * MINI + c < count; ++c) {
      const int64_t at = t + i * MINI + c;
      store_if(m.d_q, w, at, result + (4 + c) * n);
      store_if(m.d_k, w, at, result + (8 + c) * n);
      store_if(m.d_gain, w, at, result + (12 + c) * n);
      if (m.d_decay.data && m.d_decay.channels == 1) {
        Vec total{};
        for (int64_t j = 0; j < n; j += L) total += load(result + c * n + j);
        float one[L] = {sum(total)};
        store_row(m.d_decay, offset(m.d_decay, w.batch, at, w.head), one);
      } else {
        store_if(m.d_decay, w, at, result + c * n);
      }
    }
  }
}

KDN_INLINE void start_back(const Where& w, int64_t first, int64_t last, float* ds) {
  const float* d_state = w.m.d_state ? w.m.d_state + w.state() : nullptr;
  blocks(first, last, [&](auto width, int64_t at) {
    load_panels(ds + (at - first) * w.width, d_state, w, at, width);
  });
}
KDN_INLINE void end_back(const Where& w, int64_t first, int64_t last, const float* ds) {
  if (w.m.d_initial == nullptr) return;
  blocks(first, last, [&](auto width, int64_t at) {
    store_panels(w.m.d_initial + w.state(), ds + (at - first) * w.width, w, at, width);
  });
}

// Some heads of one sequence on one thread.
inline void backward(const KdnMemory& m, Heads heads) {
  const Where any(m, heads.first);
  const int64_t n = any.width, size = TILE * FactorGradients::size(n), state = n * any.columns;
  float* ds = kdn::scratch(heads.count * state + size + BackwardRoom::size(n, any.columns));
  float* gradients = ds + heads.count * state;
  const BackwardRoom room(gradients + size, n, any.columns);
  for (int64_t h = 0; h < heads.count; ++h)
    start_back(Where(m, heads.first + h), 0, any.columns, ds + h * state);
  for (Turn now{0, chunk_count(any) - 1}; now.tile >= 0; now = next_turn(now, heads, -1)) {
    const Where w(m, heads.first + now.head);
    const Turn next = next_turn(now, heads, -1);
    std::memset(gradients, 0, size * 4);
    back_columns(w, now.tile, 0, w.columns, ds + now.head * state, room, Where(m, heads.first + next.head),
                 next.tile, [&](int64_t) { return gradients; });
    back_rows(w, now.tile, room, gradients);
  }
  for (int64_t h = 0; h < heads.count; ++h)
    end_back(Where(m, heads.first + h), 0, any.columns, ds + h * state);
}

// Fewer heads than threads: their columns are shared out, `cuts` pieces a head, a window of chunks at a time.
// Each block of columns leaves its own sums; they are then added in the order in which `backward` adds
// them, so the result is the same to the last bit.
inline void backward_cut(const KdnMemory& m, int threads, int64_t cuts) {
  constexpr int64_t window = 8, block = WIDE * L;
  const int64_t heads = m.sequences.count * m.heads, n = round_up(m.key, PANEL);
  const int64_t columns = round_up(m.value, L), wide = (columns + block - 1) / block;
  const int64_t step = (wide + cuts - 1) / cuts * block, size = TILE * FactorGradients::size(n);
  const int64_t parts = columns / block + (columns % block / L + 1) / 2;  // as `blocks` cuts them
  cuts = (columns + step - 1) / step;
  std::vector<float> states(heads * n * columns), sums(heads * window * parts * size);
  int64_t longest = 0;
  for (int64_t task = 0; task < heads; ++task) {
    const int64_t count = chunk_count(Where(m, task));
    longest = count > longest ? count : longest;
  }
  auto piece = [&](int64_t i, auto&& work) {
    const Where w(m, i / cuts);
    const int64_t first = i % cuts * step, last = first + step < columns ? first + step : columns;
    work(w, first, last, states.data() + (i / cuts * columns + first) * n);
  };
  auto sums_of = [&](int64_t task, int64_t chunk, int64_t at) {
    const int64_t part = at / block + (at % block != 0);
    return sums.data() + ((task * window + chunk % window) * parts + part) * size;
  };
  kdn::parallel(heads * cuts, threads, [&](int64_t i) {
    piece(i, [&](const Where& w, int64_t first, int64_t last, float* ds) { start_back(w, first, last, ds); });
  });
  for (int64_t low = (longest - 1) / window * window; low >= 0; low -= window) {
    kdn::parallel(heads * cuts, threads, [&](int64_t i) {
      piece(i, [&](const Where& w, int64_t first, int64_t last, float* ds) {
        const BackwardRoom room(kdn::scratch(BackwardRoom::size(n, columns)), n, columns);
        const int64_t high = low + window < chunk_count(w) ? low + window : chunk_count(w);
        for (int64_t chunk = high - 1; chunk >= low; --chunk) {
          blocks(first, last, [&](auto, int64_t at) { std::memset(sums_of(i / cuts, chunk, at), 0, size * 4); });
          back_columns(w, chunk, first, last, ds, room, w, chunk - 1,
                       [&](int64_t at) { return sums_of(i / cuts, chunk, at); });
        }
      });
    });
    kdn::parallel(heads * window, threads, [&](int64_t i) {
      const Where w(m, i / window);
      const int64_t chunk = low + i % window;
      if (chunk >= chunk_count(w)) return;
      const BackwardRoom room(kdn::scratch(BackwardRoom::size(n, columns)), n, columns);
      const int64_t t = w.begin + chunk * CHUNK;
      chunk_factors(w, t, ((t + CHUNK < w.end ? CHUNK : w.end - t) + MINI - 1) / MINI, room);
      float* total = sums_of(i / window, chunk, 0);
      for (int64_t part = 1; part < parts; ++part) {
        const float* more = total + part * size;
        for (int64_t j = 0; j < size; j += L) store(total + j, load(total + j) + load(more + j));
      }
      back_rows(w, chunk, room, total);
    });
  }
  kdn::parallel(heads * cuts, threads, [&](int64_t i) {
    piece(i, [&](const Where& w, int64_t first, int64_t last, float* ds) { end_back(w, first, last, ds); });
  });
}

}  // namespace KDN_NAMESPACE
