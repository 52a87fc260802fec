// The steps of the memory's backward pass on one mini-chunk and a block of columns; memory.h has the equations.
#pragma once
#include "memory.h"

namespace KDN_NAMESPACE {

// The states here are transposed: channels side by side, a panel of them at a time, [K/PANEL][columns][PANEL]. So
// five of the seven products with a state need no sums across lanes: three sum over columns (∂Q̄, ∂K̄, ∂Ḡ), and
// what is written has channels beside one another anyway.

// Gradients of one mini-chunk's factors, in rows of K numbers: keys, queries and gains of four tokens, the decay;
// then A's and T's, 16 numbers.
struct FactorGradients {
  float* base;
  int64_t width;
  static int64_t size(int64_t width) { return 13 * width + PAIRS; }
  float* row(int kind, int c) const { return base + (kind * 4 + c) * width; }
  float* decay() const { return base + 12 * width; }
  float* pairs() const { return base + 13 * width; }
};

// Four tokens' rows times a state: to[c][column] = Σ_i rows_c[i] S[i, column].
template <int N>
KDN_INLINE void read_back(float* to, const float* rows, int64_t width, const float* s) {
  constexpr int columns = N * L, G = L / 4;  // columns at once, so that there are as many sums as lanes
  for (int64_t at = 0; at < columns; at += G) {
    Vec product[L] = {};
    for (int64_t i = 0; i < width; i += PANEL) {
      const float* panel = s + i * columns + at * PANEL;
      KDN_UNROLL
      for (int j = 0; j < PANEL; j += L) {
        Vec column[G];
        KDN_UNROLL
        for (int x = 0; x < G; ++x) column[x] = load(panel + x * PANEL + j);
        KDN_UNROLL
        for (int c = 0; c < 4; ++c) {
          const Vec row = load(rows + c * width + i + j);
          KDN_UNROLL
          for (int x = 0; x < G; ++x) product[c * G + x] += row * column[x];
        }
      }
    }
    float out[L];
    store(out, sums(product));
    KDN_UNROLL
    for (int c = 0; c < 4; ++c) std::memcpy(to + c * columns + at, out + c * G, G * 4);
  }
}

// to = γ from + Σ_c ±rows_c x_c over one panel; x: [4][columns]. One term, or two with `more`.
template <int N, bool More>
KDN_INLINE void write_back(float* to, const float* from, const float* decay, const float* rows, const float* x,
                           const float* more, const float* y, int64_t width) {
  constexpr int columns = N * L, M = PANEL / L;
  Vec gamma[M], row[4][M], other[4][M];
  KDN_UNROLL
  for (int j = 0; j < M; ++j) {
    gamma[j] = load(decay + j * L);
    KDN_UNROLL
    for (int c = 0; c < 4; ++c) {
      row[c][j] = load(rows + c * width + j * L);
      if constexpr (More) other[c][j] = load(more + c * width + j * L);
    }
  }
  for (int64_t at = 0; at < columns; ++at) {
    Vec s[M];
    KDN_UNROLL
    for (int j = 0; j < M; ++j) s[j] = gamma[j] * load(from + at * PANEL + j * L);
    KDN_UNROLL
    for (int c = 0; c < 4; ++c) {
      const Vec a = splat(x[c * columns + at]);
      KDN_UNROLL
      for (int j = 0; j < M; ++j) s[j] += row[c][j] * a;
      if constexpr (More) {
        const Vec b = splat(y[c * columns + at]);
        KDN_UNROLL
        for (int j = 0; j < M; ++j) s[j] -= other[c][j] * b;
      }
    }
    KDN_UNROLL
    for (int j = 0; j < M; ++j) store(to + at * PANEL + j * L, s[j]);
  }
}

// R of one mini-chunk again, and the state after it.
template <int N, bool Keys>
KDN_INLINE void replay(float* to, const float* s, Factors f, const float* v, int64_t columns, float* residual) {
  constexpr int span = N * L;
  Vec r[4][N];
  if constexpr (Keys) read_back<N>(residual, f.keys(), f.width, s);
  KDN_UNROLL
  for (int c = 0; c < 4; ++c)
    KDN_UNROLL
    for (int n = 0; n < N; ++n) {
      r[c][n] = load(v + c * columns + n * L);
      if constexpr (Keys) r[c][n] -= load(residual + c * span + n * L);
    }
  if constexpr (Keys) substitute<N>(r, f.pairs());
  KDN_UNROLL
  for (int c = 0; c < 4; ++c)
    KDN_UNROLL
    for (int n = 0; n < N; ++n) store(residual + c * span + n * L, r[c][n]);
  if (to == nullptr) return;
  for (int64_t i = 0; i < f.width; i += PANEL)
    write_back<N, false>(to + i * span, s + i * span, f.decay() + i, f.gains() + i, residual, nullptr, nullptr,
                         f.width);
}

// Adds to `g` what one panel of the state and of ∂S give to the factors' gradients; −∂K̄ in place of ∂K̄.
template <int N, bool Keys>
KDN_INLINE void gather(FactorGradients g, int64_t i, const float* s, const float* ds, const float* o,
                       const float* r, const float* y) {
  constexpr int columns = N * L, M = PANEL / L;
  Vec k[4][M] = {}, q[4][M] = {}, w[4][M] = {}, gamma[M] = {};
  for (int64_t at = 0; at < columns; ++at) {
    Vec a[M], b[M];
    KDN_UNROLL
    for (int j = 0; j < M; ++j) {
      a[j] = load(s + at * PANEL + j * L);
      b[j] = load(ds + at * PANEL + j * L);
      gamma[j] += a[j] * b[j];
    }
    KDN_UNROLL
    for (int c = 0; c < 4; ++c) {
      const Vec x = splat(o[c * columns + at]), z = splat(r[c * columns + at]);
      KDN_UNROLL
      for (int j = 0; j < M; ++j) {
        q[c][j] += x * a[j];
        w[c][j] += z * b[j];
      }
      if constexpr (Keys) {
        const Vec e = splat(y[c * columns + at]);
        KDN_UNROLL
        for (int j = 0; j < M; ++j) k[c][j] += e * a[j];
      }
    }
  }
  auto add = [&](float* to, Vec x) { store(to, load(to) + x); };
  KDN_UNROLL
  for (int j = 0; j < M; ++j) {
    KDN_UNROLL
    for (int c = 0; c < 4; ++c) {
      if constexpr (Keys) add(g.row(0, c) + i + j * L, k[c][j]);
      add(g.row(1, c) + i + j * L, q[c][j]);
      add(g.row(2, c) + i + j * L, w[c][j]);
    }
    add(g.decay() + i + j * L, gamma[j]);
  }
}

// One mini-chunk: ∂S after it to ∂S before it, in place; the factors' gradients added to `g`.
// o, r: ∂O and R, and room for ∂Y = ∂V in y, as [4][N·L].
template <int N, bool Keys>
KDN_INLINE void step_back(float* ds, const float* s, Factors f, FactorGradients g, const float* o, const float* r,
                          float* y) {
  constexpr int span = N * L;
  const float* pairs = f.pairs();
  read_back<N>(y, f.gains(), f.width, ds);
  Vec dr[4][N];
  KDN_UNROLL
  for (int c = 0; c < 4; ++c)
    KDN_UNROLL
    for (int n = 0; n < N; ++n) dr[c][n] = load(y + c * span + n * L);
  KDN_UNROLL
  for (int c = 0; c < 4; ++c)
    KDN_UNROLL
    for (int d = 0; d <= c; ++d) {
      const Vec a = splat(pairs[a_at(c, d)]);
      KDN_UNROLL
      for (int n = 0; n < N; ++n) dr[d][n] += a * load(o + c * span + n * L);
    }
  if constexpr (Keys) {
    KDN_UNROLL
    for (int c = 3; c > 0; --c)
      KDN_UNROLL
      for (int d = 0; d < c; ++d) {
        const Vec t = splat(pairs[t_at(c, d)]);
        KDN_UNROLL
        for (int n = 0; n < N; ++n) dr[d][n] -= t * dr[c][n];
      }
  }
  KDN_UNROLL
  for (int c = 0; c < 4; ++c)
    KDN_UNROLL
    for (int n = 0; n < N; ++n) store(y + c * span + n * L, dr[c][n]);

  Vec pair[PAIRS] = {};
  KDN_UNROLL
  for (int n = 0; n < N; ++n)
    KDN_UNROLL
    for (int c = 0; c < 4; ++c)
      KDN_UNROLL
      for (int d = 0; d <= c; ++d) {
        const Vec x = load(r + d * span + n * L);
        pair[a_at(c, d)] += load(o + c * span + n * L) * x;
        if (Keys && d < c) pair[t_at(c, d)] -= load(y + c * span + n * L) * x;
      }
  KDN_UNROLL
  for (int p = 0; p < PAIRS; p += L) store(g.pairs() + p, load(g.pairs() + p) + sums(pair + p));

  for (int64_t i = 0; i < f.width; i += PANEL) {
    float* panel = ds + i * span;
    gather<N, Keys>(g, i, s + i * span, panel, o, r, y);
    // ∂S ← γ ∂S + Q̄ᵀ ∂O − K̄ᵀ ∂Y
    write_back<N, Keys>(panel, panel, f.decay() + i, f.queries() + i, o, f.keys() + i, y, f.width);
  }
}

// A block's columns of a [K, V] matrix to and from panels; padding is 0. Four by four numbers at a time.
typedef float Four __attribute__((vector_size(16)));
KDN_INLINE void turn(float* to, int64_t to_row, const float* from, int64_t from_row) {
  Four x[4], y[4];
  for (int i = 0; i < 4; ++i) std::memcpy(&x[i], from + i * from_row, 16);
  for (int i = 0; i < 2; ++i) {
    y[i] = __builtin_shufflevector(x[2 * i], x[2 * i + 1], 0, 4, 1, 5);
    y[2 + i] = __builtin_shufflevector(x[2 * i], x[2 * i + 1], 2, 6, 3, 7);
  }
  for (int i = 0; i < 2; ++i) {
    const Four low = __builtin_shufflevector(y[2 * i], y[2 * i + 1], 0, 1, 4, 5);
    const Four high = __builtin_shufflevector(y[2 * i], y[2 * i + 1], 2, 3, 6, 7);
    std::memcpy(to + 2 * i * to_row, &low, 16);
    std::memcpy(to + (2 * i + 1) * to_row, &high, 16);
  }
}
KDN_INLINE void load_panels(float* to, const float* from, const Where& w, int64_t at, int n) {
  const int64_t size = n * L, used = at + size <= w.m.value ? size : w.m.value - at;
  const int64_t keys = from == nullptr ? 0 : w.m.key, whole = keys / 4 * 4, tiles = used / 4 * 4;
  if (keys < w.width || used < size) std::memset(to, 0, w.width * size * 4);
  auto place = [&](int64_t i, int64_t j) { return to + (i / PANEL * size + j) * PANEL + i % PANEL; };
  for (int64_t i = 0; i < keys; i += i < whole ? 4 : 1) {
    const float* row = from + i * w.m.value + at;
    if (i < whole)
      for (int64_t j = 0; j < tiles; j += 4) turn(place(i, j), PANEL, row + j, w.m.value);
    for (int64_t x = i; x < (i < whole ? i + 4 : i + 1); ++x)
      for (int64_t j = i < whole ? tiles : 0; j < used; ++j) *place(x, j) = from[x * w.m.value + at + j];
  }
}
KDN_INLINE void store_panels(float* to, const float* from, const Where& w, int64_t at, int n) {
  const int64_t size = n * L, used = at + size <= w.m.value ? size : w.m.value - at;
  for (int64_t i = 0; i < w.m.key; ++i)
    for (int64_t j = 0; j < used; ++j)
      to[i * w.m.value + at + j] = from[(i / PANEL * size + j) * PANEL + i % PANEL];
}

}  // namespace KDN_NAMESPACE
