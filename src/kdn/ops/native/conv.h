// Short causal convolutions of a layer's queries, keys and values, with what follows them in one pass:
//
//     c_t = Σ_p w_p ⊙ x_{t − (W−1) + p}      s = c σ(c) (SiLU), or c      y = s, or s / √(‖s‖² + ε) per head
//
// One task is one head of one sequence, tile by tile of tokens; before its start a sequence has its history, or 0.
// Backward goes from the last tile to the first, computes c again, and
//
//     ∂c_t  from ∂y_t      ∂x_τ = Σ_p w_p ⊙ ∂c_{τ + (W−1) − p}      ∂w_p = Σ_t ∂c_t ⊙ x_{t − (W−1) + p}
#pragma once
#include <cmath>

#include "simd.h"
#include "threads.h"

namespace KDN_NAMESPACE {
namespace conv {

constexpr int64_t TOKENS = 32;  // of a tile

struct Task {
  const KdnConv& a;
  int64_t batch, begin, end, head, sequence, width, back;  // back: W − 1
  Task(const KdnConv& a, int64_t task)
      : a(a), head(task % a.heads), sequence(task / a.heads), width(round_up(a.key, L)), back(a.width - 1) {
    const KdnSequences& s = a.sequences;
    batch = s.offsets ? 0 : sequence;
    begin = s.offsets ? s.offsets[sequence] : 0;
    end = s.offsets ? s.offsets[sequence + 1] : s.length;
  }
  int64_t row(const KdnRows& x, int64_t t) const { return offset(x, batch, t, head); }
  // Where this head's numbers are in [sequence, rows, heads, key].
  int64_t plain(int64_t rows, int64_t r) const { return ((sequence * rows + r) * a.heads + head) * a.key; }
};

// One token's input; before the sequence's start, from its history.
KDN_INLINE void load_input(float* to, const Task& w, int64_t t) {
  if (t >= w.begin) return load_row(to, w.a.x, w.row(w.a.x, t), w.width);
  const int64_t r = t - w.begin + w.back;
  for (int64_t i = 0; i < w.width; ++i)
    to[i] = w.a.history && i < w.a.key ? w.a.history[w.plain(w.back, r) + i] : 0;
}

KDN_INLINE void load_taps(float* to, const Task& w) {
  for (int64_t p = 0; p <= w.back; ++p)
    for (int64_t i = 0; i < w.width; ++i)
      to[p * w.width + i] = i < w.a.key ? w.a.weight[(p * w.a.heads + w.head) * w.a.key + i] : 0;
}

// The widths' loops are short: the usual one, 4, is known to the compiler, for others Back is −1.
template <int64_t Back>
KDN_INLINE int64_t back_of(const Task& w) {
  return Back < 0 ? w.back : Back;
}

// c of the token whose oldest input is rows[0].
KDN_INLINE Vec convolve(const float* rows, const float* taps, int64_t width, int64_t back, int64_t i) {
  Vec c = load(taps + i) * load(rows + i);
  for (int64_t p = 1; p <= back; ++p) c += load(taps + p * width + i) * load(rows + p * width + i);
  return c;
}
KDN_INLINE Vec sigmoid(Vec x) {
  const Vec low = splat(-87.f);
  const Vec y = splat(1.f) / (splat(1.f) + exp(-(x > low ? x : low)));
  return x == x ? (x > low ? y : Vec{}) : x;  // NaN stays NaN
}

template <int64_t Back>
void forward(const KdnConv& a, int64_t task) {
  const Task w(a, task);
  const int64_t n = w.width, back = back_of<Back>(w);
  float* taps = kdn::scratch((back + 1) * n + (back + TOKENS) * n + n);
  float* rows = taps + (back + 1) * n;
  float* y = rows + (back + TOKENS) * n;
  load_taps(taps, w);
  for (int64_t r = 0; r < back; ++r) load_input(rows + r * n, w, w.begin - back + r);
  for (int64_t first = w.begin; first < w.end; first += TOKENS) {
    const int64_t count = first + TOKENS < w.end ? TOKENS : w.end - first;
    for (int64_t t = 0; t < count; ++t) load_input(rows + (back + t) * n, w, first + t);
    for (int64_t t = 0; t < count; ++t) {
      Vec squares{};
      for (int64_t i = 0; i < n; i += L) {
        Vec s = convolve(rows + t * n, taps, n, back, i);
        if (a.activation) s *= sigmoid(s);
        squares += s * s;
        store(y + i, s);
      }
      if (a.unit) {
        const Vec rho = splat(1 / std::sqrt(sum(squares) + a.eps));
        for (int64_t i = 0; i < n; i += L) store(y + i, load(y + i) * rho);
      }
      store_row(a.y, w.row(a.y, first + t), y);
    }
    std::memmove(rows, rows + count * n, back * n * 4);
  }
}

template <int64_t Back>
void backward(const KdnConv& a, int64_t task) {
  const Task w(a, task);
  const int64_t n = w.width, back = back_of<Back>(w), taps_size = (back + 1) * n;
  float* taps = kdn::scratch(2 * taps_size + 2 * (back + TOKENS) * n + 2 * n);
  float* d_taps = taps + taps_size;
  float* rows = d_taps + taps_size;
  float* dc = rows + (back + TOKENS) * n;  // of a tile, and of the `back` tokens after it
  float* s = dc + (back + TOKENS) * n;
  float* dy = s + n;
  load_taps(taps, w);
  std::memset(d_taps, 0, taps_size * 4);
  std::memset(dc, 0, (back + TOKENS) * n * 4);
  const int64_t tiles = (w.end - w.begin + TOKENS - 1) / TOKENS;
  int64_t count = 0;
  for (int64_t tile = tiles - 1; tile >= 0; --tile) {
    const int64_t first = w.begin + tile * TOKENS;
    std::memmove(dc + TOKENS * n, dc, back * n * 4);
    count = first + TOKENS < w.end ? TOKENS : w.end - first;
    for (int64_t t = -back; t < count; ++t) load_input(rows + (back + t) * n, w, first + t);
    for (int64_t t = count; t < TOKENS; ++t) std::memset(dc + t * n, 0, n * 4);
    for (int64_t t = 0; t < count; ++t) {
      float* d = dc + t * n;
      load_row(dy, a.d_y, w.row(a.d_y, first + t), n);
      Vec squares{}, along{};
      for (int64_t i = 0; i < n; i += L) {
        const Vec c = convolve(rows + t * n, taps, n, back, i);
        const Vec sigma = a.activation ? sigmoid(c) : splat(1.f);
        const Vec value = c * sigma;
        squares += value * value;
        along += value * load(dy + i);
        store(s + i, value);
        // ∂s/∂c = σ + c σ (1 − σ)
        store(d + i, a.activation ? sigma + value * (splat(1.f) - sigma) : sigma);
      }
      if (a.unit) {
        const float rho = 1 / std::sqrt(sum(squares) + a.eps);
        const Vec scale = splat(rho), share = splat(rho * rho * rho * sum(along));
        for (int64_t i = 0; i < n; i += L)
          store(d + i, load(d + i) * (scale * load(dy + i) - share * load(s + i)));
      } else {
        for (int64_t i = 0; i < n; i += L) store(d + i, load(d + i) * load(dy + i));
      }
    }
    for (int64_t i = 0; i < n; i += L)
      for (int64_t p = 0; p <= back; ++p) {
        Vec sum{};  // a tile's own, so that a long sequence's sum keeps its digits
        for (int64_t t = 0; t < count; ++t) sum += load(dc + t * n + i) * load(rows + (t + p) * n + i);
        store(d_taps + p * n + i, load(d_taps + p * n + i) + sum);
      }
    // Rows of the tile, whose dc and those after it are all there now; their own history at the sequence's start.
    auto d_input = [&](int64_t t) {
      for (int64_t i = 0; i < n; i += L) {
        Vec x{};
        for (int64_t p = 0; p <= back; ++p) {
          const int64_t reader = t + back - p;
          if (reader >= 0) x += load(taps + p * n + i) * load(dc + reader * n + i);
        }
        store(dy + i, x);
      }
    };
    for (int64_t t = 0; t < count; ++t) {
      d_input(t);
      store_row(a.d_x, w.row(a.d_x, first + t), dy);
    }
    if (tile == 0 && a.d_history)
      for (int64_t r = 0; r < back; ++r) {
        d_input(r - back);
        std::memcpy(a.d_history + w.plain(back, r), dy, a.key * 4);
      }
  }
  if (tiles == 0 && a.d_history)
    for (int64_t r = 0; r < back; ++r) std::memset(a.d_history + w.plain(back, r), 0, a.key * 4);
  for (int64_t p = 0; p <= back; ++p)
    std::memcpy(a.d_weight + w.plain(back + 1, p), d_taps + p * n, a.key * 4);
}

}  // namespace conv

inline void conv_forward(const KdnConv* a, int threads) {
  auto* work = a->width == 4 ? conv::forward<3> : conv::forward<-1>;
  kdn::parallel(a->sequences.count * a->heads, threads, [&](int64_t i) { work(*a, i); });
}
inline void conv_backward(const KdnConv* a, int threads) {
  auto* work = a->width == 4 ? conv::backward<3> : conv::backward<-1>;
  kdn::parallel(a->sequences.count * a->heads, threads, [&](int64_t i) { work(*a, i); });
}

}  // namespace KDN_NAMESPACE
