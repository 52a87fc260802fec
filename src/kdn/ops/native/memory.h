// The memory: S ← (I − g kᵀ) D S + g vᵀ, o = τ Sᵀ q, as the recurrence itself, four tokens at a time.
//
// Per *mini-chunk* of four tokens, with P_c the running product of their decays,
//
//     K̄_c = P_c k_c    Q̄_c = τ P_c q_c    Ḡ_c = (decay after c) g_c    γ = P_3          (factors, K wide)
//     T_cd = k_c · g_d decayed from d to c,   A_cd = τ q_c · g_d likewise               (16 numbers)
//     R = (I + T)⁻¹ (V − K̄ S)       O = Q̄ S + A R       S ← γ S + Ḡᵀ R
//
// so the arithmetic is small matrix products, and the state is loaded and stored once for four tokens: the pass that
// writes one mini-chunk also reads for the next.
// Running products of decays ≤ 1 divide by nothing and cannot overflow. The columns of S are independent:
// a block of them, K × 4 vectors, stays in the first-level cache through a tile of mini-chunks, whose
// factors are computed once for all blocks.
//
// Backward, per chunk of CHUNK tokens from the last to the first: the states at the start of its mini-chunks
// are recomputed from a checkpoint into the second-level cache, then, with ∂S in place of S,
//
//     ∂R = Aᵀ ∂O + Ḡ ∂S      ∂Y = (I + T)⁻ᵀ ∂R = ∂V      ∂S ← γ ∂S + Q̄ᵀ ∂O − K̄ᵀ ∂Y
//     ∂Q̄ = ∂O Sᵀ   ∂K̄ = −∂Y Sᵀ   ∂Ḡ = R ∂Sᵀ   ∂γ = Σ S ∂S   ∂A = ∂O Rᵀ   ∂T = −∂Y Rᵀ
//
// where S, ∂S are those before and after the mini-chunk. The sums over columns are added block by block, in
// order, so results do not depend on the number of threads.
#pragma once
#include "heads.h"
#include "simd.h"
#include "threads.h"

namespace KDN_NAMESPACE {

constexpr int MINI = 4;
constexpr int64_t CHUNK = KDN_CHUNK;
constexpr int TILE = CHUNK / MINI;       // mini-chunks whose factors are kept together
constexpr int WIDE = 4;                  // vectors in a full block of columns
constexpr int PANEL = L == 16 ? 2 * L : L;  // channels that the backward pass takes at a time
constexpr int PAIRS = 16;                // numbers of A (10) and T (6)

// Where A_cd and T_cd (d < c) are among the 16.
KDN_INLINE constexpr int a_at(int c, int d) { return c * (c + 1) / 2 + d; }
KDN_INLINE constexpr int t_at(int c, int d) { return 10 + c * (c - 1) / 2 + d; }

// The factors of one mini-chunk, in a row of floats.
struct Factors {
  float* base;
  int64_t width;  // K rounded up to panels
  static int64_t size(int64_t width) { return 13 * width + PAIRS; }
  float* keys(int c = 0) const { return base + c * width; }
  float* queries(int c = 0) const { return base + (4 + c) * width; }
  float* gains(int c = 0) const { return base + (8 + c) * width; }
  float* decay() const { return base + 12 * width; }
  float* pairs() const { return base + 13 * width; }
};

// Everything a task needs to know about its sequence and head.
struct Where {
  const KdnMemory& m;
  int64_t batch, begin, end, head, sequence;
  int64_t width;    // K rounded up to panels
  int64_t columns;  // V rounded up to vectors

  Where(const KdnMemory& m, int64_t task)
      : m(m), head(task % m.heads), sequence(task / m.heads), width(round_up(m.key, PANEL)),
        columns(round_up(m.value, L)) {
    const KdnSequences& s = m.sequences;
    batch = s.offsets ? 0 : sequence;
    begin = s.offsets ? s.offsets[sequence] : 0;
    end = s.offsets ? s.offsets[sequence + 1] : s.length;
  }
  int64_t state() const { return (sequence * m.heads + head) * m.key * m.value; }
  int64_t checkpoint(int64_t chunk) const {
    return ((m.first_chunk[sequence] + chunk) * m.heads + head) * m.key * m.value;
  }
};

// Asks for rows of a later tile. A head's rows lie pages apart, where the hardware does not look ahead by itself;
// without this a third of the time is waiting for them. A tile is gone through several times, once for every few
// columns; pass `part` of `parts` asks for its share of the tokens, so that requests come evenly.
KDN_INLINE void fetch_row(const KdnRows& x, const Where& w, int64_t t) {
  if (x.data == nullptr) return;
  const int64_t size = x.type == KDN_FLOAT32 ? 4 : 2;
  const char* row = (const char*)x.data + offset(x, w.batch, t, w.head) * size;
  for (int64_t i = 0; i < x.channels * size; i += 64) prefetch(row + i);
}
struct Fetch {
  const Where& w;
  int64_t tile, part, parts;
  // The tokens of the later tile's mini-chunk i that are this pass's; f(t) for each.
  template <typename F>
  KDN_INLINE void tokens(int64_t i, F&& f) const {
    for (int64_t c = 0; c < MINI; ++c) {
      const int64_t t = w.begin + tile * CHUNK + i * MINI + c;
      if ((i * MINI + c) % parts == part && t >= w.begin && t < w.end) f(t);
    }
  }
  KDN_INLINE void inputs(int64_t t) const {
    fetch_row(w.m.q, w, t);
    fetch_row(w.m.k, w, t);
    fetch_row(w.m.v, w, t);
    fetch_row(w.m.gain, w, t);
    fetch_row(w.m.decay, w, t);
  }
};

// A row of float32, padded to vectors: where it lies if it lies so, else copied to `room`.
KDN_INLINE const float* see_row(const KdnRows& x, const Where& w, int64_t t, float* room) {
  const int64_t at = offset(x, w.batch, t, w.head);
  if (x.type == KDN_FLOAT32 && x.channels == w.width) return (const float*)x.data + at;
  load_row(room, x, at, w.width);
  return room;
}

// α of one token, K wide.
KDN_INLINE void load_decay(float* to, const Where& w, int64_t t) {
  const KdnRows& d = w.m.decay;
  if (d.data == nullptr) {
    for (int64_t i = 0; i < w.width; i += L) store(to + i, splat(1.f));
  } else if (d.channels == 1) {
    float one[L];
    load_row(one, d, offset(d, w.batch, t, w.head), L);
    Vec a = exp(splat(one[0]));
    for (int64_t i = 0; i < w.width; i += L) store(to + i, a);
  } else {
    const float* row = see_row(d, w, t, to);
    for (int64_t i = 0; i < w.width; i += L) store(to + i, exp(load(row + i)));
  }
}

// The four tokens from t; those past the end neither decay, write nor read.
struct Tokens {
  const float *alpha[MINI], *q[MINI], *k[MINI], *g[MINI];
  static int64_t size(int64_t width) { return 16 * width; }
};
KDN_INLINE Tokens load_tokens(float* room, const Where& w, int64_t t) {
  Tokens x;
  for (int c = 0; c < MINI; ++c, room += 4 * w.width) {
    float *alpha = room, *q = alpha + w.width, *k = q + w.width, *g = k + w.width;
    x.alpha[c] = alpha;
    x.q[c] = q;
    x.k[c] = k;
    x.g[c] = g;
    if (t + c < w.end) {
      load_decay(alpha, w, t + c);
      x.q[c] = see_row(w.m.q, w, t + c, q);
      x.g[c] = see_row(w.m.gain, w, t + c, g);
      if (w.m.k.data)
        x.k[c] = see_row(w.m.k, w, t + c, k);
      else
        std::memset(k, 0, w.width * 4);
    } else {
      for (int64_t i = 0; i < w.width; i += L) store(alpha + i, splat(1.f));
      std::memset(q, 0, 3 * w.width * 4);
    }
  }
  return x;
}

KDN_INLINE void make_factors(Factors f, const Tokens& x, float scale) {
  const int64_t n = f.width;
  Vec pair[PAIRS] = {};
  const Vec tau = splat(scale);
  for (int64_t i = 0; i < n; i += L) {
    Vec a[4], q[4], k[4], g[4];
    KDN_UNROLL
    for (int c = 0; c < 4; ++c) {
      a[c] = load(x.alpha[c] + i);
      q[c] = load(x.q[c] + i) * tau;
      k[c] = load(x.k[c] + i);
      g[c] = load(x.g[c] + i);
    }
    // g_d as it decays from token to token: `late[d]` at token c.
    Vec late[4], prefix = splat(1.f);
    KDN_UNROLL
    for (int c = 0; c < 4; ++c) {
      prefix = prefix * a[c];
      store(f.keys(c) + i, k[c] * prefix);
      store(f.queries(c) + i, q[c] * prefix);
      KDN_UNROLL
      for (int d = 0; d < c; ++d) {
        late[d] = late[d] * a[c];
        pair[t_at(c, d)] += k[c] * late[d];
        pair[a_at(c, d)] += q[c] * late[d];
      }
      late[c] = g[c];
      pair[a_at(c, c)] += q[c] * g[c];
    }
    KDN_UNROLL
    for (int c = 0; c < 4; ++c) store(f.gains(c) + i, late[c]);
    store(f.decay() + i, prefix);
  }
  for (int p = 0; p < PAIRS; p += L) store(f.pairs() + p, sums(pair + p));
}

// --- mini-chunks on some columns ---

// One pass over M vectors of a state's columns, `stride` floats a row: write a mini-chunk, γ_i S[i] + Σ_c g_c[i] r_c,
// and read the next one, seen_c = Σ_i rows_c[i] S[i], for C rows. Once loaded, a row of S serves both.
template <int C, int M, bool Write, bool Read>
KDN_INLINE void sweep(float* s, int64_t stride, int64_t key, Factors f, const Vec (*r)[M], const float* rows,
                      Vec (*seen)[M]) {
  Vec add[4][M], sum[C][M] = {};
  if constexpr (Write)
    KDN_UNROLL
    for (int c = 0; c < 4; ++c)
      KDN_UNROLL
      for (int j = 0; j < M; ++j) add[c][j] = r[c][j];
  const float *decay = f.decay(), *gains = f.gains();
  auto get = [&](int64_t i, Vec* row) {
    KDN_UNROLL
    for (int j = 0; j < M; ++j) row[j] = load(s + i * stride + j * L);
    if constexpr (Write) {
      const Vec gamma = splat(decay[i]);
      KDN_UNROLL
      for (int j = 0; j < M; ++j) row[j] *= gamma;
      KDN_UNROLL
      for (int c = 0; c < 4; ++c) {
        const Vec g = splat(gains[c * f.width + i]);
        KDN_UNROLL
        for (int j = 0; j < M; ++j) row[j] += g * add[c][j];
      }
      KDN_UNROLL
      for (int j = 0; j < M; ++j) store(s + i * stride + j * L, row[j]);
    }
  };
  auto use = [&](int64_t i, const Vec* row) {
    if constexpr (Read)
      KDN_UNROLL
      for (int c = 0; c < C; ++c) {
        const Vec x = splat(rows[c * f.width + i]);
        KDN_UNROLL
        for (int j = 0; j < M; ++j) sum[c][j] += x * row[j];
      }
  };
  // A row is used one step after it is made: neither then waits for the other, a tenth of the time.
  Vec last[M];
  get(0, last);
  for (int64_t i = 1; i < key; ++i) {
    Vec row[M];
    get(i, row);
    use(i - 1, last);
    KDN_UNROLL
    for (int j = 0; j < M; ++j) last[j] = row[j];
  }
  use(key - 1, last);
  if constexpr (Read)
    KDN_UNROLL
    for (int c = 0; c < C; ++c)
      KDN_UNROLL
      for (int j = 0; j < M; ++j) seen[c][j] = sum[c][j];
}

// Residuals R from V − K̄S, in place.
template <int N>
KDN_INLINE void substitute(Vec (*r)[N], const float* pairs) {
  KDN_UNROLL
  for (int c = 1; c < 4; ++c)
    KDN_UNROLL
    for (int d = 0; d < c; ++d) {
      const Vec t = splat(pairs[t_at(c, d)]);
      KDN_UNROLL
      for (int n = 0; n < N; ++n) r[c][n] -= t * r[d][n];
    }
}

// Rows of one token each, as they lie in a tensor or in a copy.
template <typename Float>
struct RowsAt {
  Float* first;
  int64_t stride;
  RowsAt from(int64_t token, int64_t column = 0) const { return {first + token * stride + column, stride}; }
};
using Values = RowsAt<const float>;
using Outputs = RowsAt<float>;

// What a mini-chunk writes and answers, from what its keys and queries read: R and O.
template <int M, bool Keys>
KDN_INLINE void answer(Vec (*r)[M], const Vec (*seen)[M], Factors f, Values v, Outputs o) {
  const float* pairs = f.pairs();
  KDN_UNROLL
  for (int c = 0; c < 4; ++c)
    KDN_UNROLL
    for (int j = 0; j < M; ++j) {
      r[c][j] = load(v.first + c * v.stride + j * L);
      if constexpr (Keys) r[c][j] -= seen[c][j];
    }
  if constexpr (Keys) substitute<M>(r, pairs);
  KDN_UNROLL
  for (int c = 0; c < 4; ++c) {
    Vec out[M];
    KDN_UNROLL
    for (int j = 0; j < M; ++j) out[j] = seen[(Keys ? 4 : 0) + c][j];
    KDN_UNROLL
    for (int d = 0; d <= c; ++d) {
      const Vec a = splat(pairs[a_at(c, d)]);
      KDN_UNROLL
      for (int j = 0; j < M; ++j) out[j] += a * r[d][j];
    }
    KDN_UNROLL
    for (int j = 0; j < M; ++j) store(o.first + c * o.stride + j * L, out[j]);
  }
}

// All mini-chunks of a tile on M vectors of columns. `before(i)` is called before each.
template <int M, bool Keys, typename Before>
KDN_INLINE void through_tile(float* s, int64_t stride, int64_t key, const float* factors, int64_t width,
                             int64_t minis, Values v, Outputs o, Before&& before) {
  constexpr int C = Keys ? 8 : 4;
  auto at = [&](int64_t i) { return Factors{const_cast<float*>(factors) + i * Factors::size(width), width}; };
  auto rows = [&](int64_t i) { return Keys ? at(i).keys() : at(i).queries(); };  // queries follow the keys
  Vec r[4][M], seen[C][M];
  sweep<C, M, false, true>(s, stride, key, at(0), r, rows(0), seen);
  for (int64_t i = 0; i < minis; ++i) {
    before(i);
    answer<M, Keys>(r, seen, at(i), v.from(i * MINI), o.from(i * MINI));
    if (i + 1 < minis)
      sweep<C, M, true, true>(s, stride, key, at(i), r, rows(i + 1), seen);
    else
      sweep<C, M, true, false>(s, stride, key, at(i), r, nullptr, seen);
  }
}

// --- blocks of columns ---

// Calls f(std::integral_constant<int, vectors>, first column) for each block of [first, last).
template <typename F>
KDN_INLINE void blocks(int64_t first, int64_t last, F&& f) {
  int64_t at = first;
  for (; at + WIDE * L <= last; at += WIDE * L) f(std::integral_constant<int, WIDE>{}, at);
  if (at + 2 * L <= last) {
    f(std::integral_constant<int, 2>{}, at);
    at += 2 * L;
  }
  if (at < last) f(std::integral_constant<int, 1>{}, at);
}

// A block's columns of a [K, V] matrix to and from [width, vectors·L]; padding is 0.
KDN_INLINE void load_block(float* to, const float* from, const Where& w, int64_t at, int n) {
  const int64_t size = n * L, used = at + size <= w.m.value ? size : w.m.value - at;
  for (int64_t i = 0; i < w.width; ++i) {
    int64_t j = 0;
    if (from != nullptr && i < w.m.key) {
      std::memcpy(to + i * size, from + i * w.m.value + at, used * 4);
      j = used;
    }
    for (; j < size; ++j) to[i * size + j] = 0;
  }
}
KDN_INLINE void store_block(float* to, const float* from, const Where& w, int64_t at, int n) {
  const int64_t size = n * L, used = at + size <= w.m.value ? size : w.m.value - at;
  for (int64_t i = 0; i < w.m.key; ++i)
    std::memcpy(to + i * w.m.value + at, from + i * size, used * 4);
}

// --- forward ---

// One tile of one head: `state` before it to `state` after it. Meanwhile asks for the rows of `next`.
KDN_INLINE void forward_tile(const Where& w, int64_t tile, int64_t first, int64_t last, float* state,
                             float* room, const Where& next, int64_t next_tile) {
  const KdnMemory& m = w.m;
  float* factors = room;
  float* tokens = factors + TILE * Factors::size(w.width);
  float* values = tokens + Tokens::size(w.width);
  float* outputs = values + CHUNK * w.columns;
  const int64_t t = w.begin + tile * CHUNK, count = t + CHUNK < w.end ? CHUNK : w.end - t;
  const int64_t minis = (count + MINI - 1) / MINI;
  if (m.checkpoints)
    blocks(first, last, [&](auto n, int64_t at) {
      store_block(m.checkpoints + w.checkpoint(tile), state + (at - first) * w.width, w, at, n);
    });
  for (int64_t i = 0; i < minis; ++i) {
    Tokens x = load_tokens(tokens, w, t + i * MINI);
    make_factors(Factors{factors + i * Factors::size(w.width), w.width}, x, m.scale);
  }
  // Whole mini-chunks of float32 in full vectors are read and written where they lie.
  auto in_place = [&](const KdnRows& x) {
    return x.type == KDN_FLOAT32 && x.channels == w.columns && count % MINI == 0;
  };
  Values v{values, w.columns};
  if (in_place(m.v))
    v = {(const float*)m.v.data + offset(m.v, w.batch, t, w.head), m.v.time};
  else
    for (int64_t i = 0; i < minis * MINI; ++i) {
      if (i < count)
        load_row(values + i * w.columns, m.v, offset(m.v, w.batch, t + i, w.head), w.columns);
      else
        std::memset(values + i * w.columns, 0, w.columns * 4);
    }
  Outputs o{outputs, w.columns};
  if (in_place(m.out)) o = {(float*)m.out.data + offset(m.out, w.batch, t, w.head), m.out.time};
  int64_t part = 0;
  blocks(first, last, [&](auto n, int64_t at) {
    float* s = state + (at - first) * w.width;
    constexpr int N = decltype(n)::value, M = L == 16 && N > 1 ? 2 : 1;  // as registers allow
    for (int j = 0; j < N; j += M, ++part) {
      const Fetch later{next, next_tile, part, (last - first) / (M * L)};
      auto before = [&](int64_t i) {
        later.tokens(i, [&](int64_t t) {
          later.inputs(t);
          fetch_row(m.out, next, t);
        });
      };
      const Values vs = v.from(0, at + j * L);
      const Outputs os = o.from(0, at + j * L);
      if (m.k.data)
        through_tile<M, true>(s + j * L, N * L, m.key, factors, w.width, minis, vs, os, before);
      else
        through_tile<M, false>(s + j * L, N * L, m.key, factors, w.width, minis, vs, os, before);
    }
  });
  if (o.first != outputs) return;
  KdnRows mine = m.out;  // this task's columns
  mine.channels = (int32_t)((last < m.value ? last : m.value) - first);
  for (int64_t i = 0; i < count; ++i)
    store_row(mine, offset(m.out, w.batch, t + i, w.head) + first, outputs + i * w.columns + first);
}

inline void forward(const KdnMemory& m, Heads heads, int64_t first, int64_t last) {
  const Where any(m, heads.first);
  const int64_t size = any.width * (last - first);  // of a state's columns of this task
  float* states = kdn::scratch(heads.count * size + TILE * Factors::size(any.width) +
                               Tokens::size(any.width) + 2 * CHUNK * any.columns);
  float* room = states + heads.count * size;
  for (int64_t h = 0; h < heads.count; ++h) {
    const Where w(m, heads.first + h);
    blocks(first, last, [&](auto n, int64_t at) {
      load_block(states + h * size + (at - first) * w.width, m.initial ? m.initial + w.state() : nullptr,
                 w, at, n);
    });
  }
  const int64_t tiles = (any.end - any.begin + CHUNK - 1) / CHUNK;
  for (Turn now{0, 0}; now.tile < tiles; now = next_turn(now, heads, 1)) {
    const Turn next = next_turn(now, heads, 1);
    forward_tile(Where(m, heads.first + now.head), now.tile, first, last, states + now.head * size, room,
                 Where(m, heads.first + next.head), next.tile);
  }
  for (int64_t h = 0; h < heads.count; ++h) {
    const Where w(m, heads.first + h);
    blocks(first, last, [&](auto n, int64_t at) {
      store_block(m.state + w.state(), states + h * size + (at - first) * w.width, w, at, n);
    });
  }
}

}  // namespace KDN_NAMESPACE
