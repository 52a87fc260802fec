// What stands around the memory in a layer, a row of one token and head at a time:
//
//     decay        log α = −rate · softplus(f + bias)
//     read-out     y = x ρ ⊙ w ⊙ a(gate)      ρ = 1/√(mean x² + ε),  a: σ or SiLU, or 1 where there is no gate
//     SwiGLU       y = SiLU(gate) ⊙ up
//
// One task is one head of one batch row, or KDN_PIECE of its tokens. Gradients of weights come as sums per task, for the caller to add up.
#pragma once
#include <cmath>

#include "conv.h"

namespace KDN_NAMESPACE {
namespace layer {

// softplus(x) = max(x, 0) + log(1 + e^−|x|), the logarithm by 2 artanh(u / (2 + u)), u ≤ 1.
KDN_INLINE Vec softplus(Vec x) {
  const Vec zero{}, up = x > zero ? x : zero, down = x > zero ? -x : x;
  const Vec low = splat(-87.f);
  const Vec u = exp(down > low ? down : low), z = u / (splat(2.f) + u), z2 = z * z;
  Vec p = splat(2.f / 13);
  p = p * z2 + splat(2.f / 11);
  p = p * z2 + splat(2.f / 9);
  p = p * z2 + splat(2.f / 7);
  p = p * z2 + splat(2.f / 5);
  p = p * z2 + splat(2.f / 3);
  p = p * z2 + splat(2.f);
  const Vec y = up + p * z;
  return x == x ? y : x;  // NaN stays NaN
}

struct Place {
  int64_t batch, head, task, width;
  Place(int64_t heads, int64_t channels, int64_t task)
      : batch(task / heads), head(task % heads), task(task), width(round_up(channels, L)) {}
  int64_t row(const KdnRows& x, int64_t t) const { return offset(x, batch, t, head); }
};

KDN_INLINE void load_plain(float* to, const float* from, int64_t n, int64_t width) {
  for (int64_t i = 0; i < width; ++i) to[i] = i < n ? from[i] : 0;
}

inline void decay_forward(const KdnDecay& a, int64_t task) {
  const Place w(a.heads, a.key, task);
  const int64_t n = w.width;
  float *bias = kdn::scratch(2 * n), *x = bias + n;
  load_plain(bias, a.bias + w.head * a.key, a.key, n);
  const Vec rate = splat(-a.rate[w.head]);
  for (int64_t t = 0; t < a.time; ++t) {
    load_row(x, a.f, w.row(a.f, t), n);
    for (int64_t i = 0; i < n; i += L) store(x + i, rate * softplus(load(x + i) + load(bias + i)));
    store_row(a.out, w.row(a.out, t), x);
  }
}

inline void decay_backward(const KdnDecay& a, int64_t task) {
  const Place w(a.heads, a.key, task);
  const int64_t n = w.width;
  float *bias = kdn::scratch(7 * n), *x = bias + n, *d = x + n, *d_bias = d + n, *d_rate = d_bias + n;
  float* total = d_rate + n;  // of d_bias and d_rate over the pieces before, so that long sums keep their digits
  load_plain(bias, a.bias + w.head * a.key, a.key, n);
  std::memset(d_bias, 0, 4 * n * 4);
  const Vec rate = splat(-a.rate[w.head]);
  for (int64_t t = 0; t < a.time; ++t) {
    load_row(x, a.f, w.row(a.f, t), n);
    load_row(d, a.d_out, w.row(a.d_out, t), n);
    for (int64_t i = 0; i < n; i += L) {
      const Vec f = load(x + i) + load(bias + i), g = load(d + i), d_f = rate * g * conv::sigmoid(f);
      store(d_rate + i, load(d_rate + i) - g * softplus(f));
      store(d_bias + i, load(d_bias + i) + d_f);
      store(x + i, d_f);
    }
    store_row(a.d_f, w.row(a.d_f, t), x);
    if ((t + 1) % KDN_PIECE == 0 || t + 1 == a.time) {
      for (int64_t i = 0; i < 2 * n; i += L) store(total + i, load(total + i) + load(d_bias + i));
      std::memset(d_bias, 0, 2 * n * 4);
    }
  }
  float sum_of_rate = 0;
  for (int64_t i = 0; i < a.key; ++i) sum_of_rate += total[n + i];
  a.d_rate[task] = sum_of_rate;
  std::memcpy(a.d_bias + task * a.key, total, a.key * 4);
}

KDN_INLINE float mean_root(const float* x, int64_t n, int64_t channels, float eps) {
  Vec squares{};
  for (int64_t i = 0; i < n; i += L) squares += load(x + i) * load(x + i);
  return 1 / std::sqrt(sum(squares) / channels + eps);
}

// One task of the read-out: a piece of a head's tokens, so that a norm, a single wide head, has tasks enough.
struct Piece : Place {
  int64_t first, last;
  Piece(const KdnReadOut& a, int64_t task, int64_t pieces) : Place(a.heads, a.value, task / pieces) {
    first = task % pieces * KDN_PIECE;
    last = first + KDN_PIECE < a.time ? first + KDN_PIECE : a.time;
  }
};

inline void read_out_forward(const KdnReadOut& a, int64_t task, int64_t pieces) {
  const Piece w(a, task, pieces);
  const int64_t n = w.width;
  float *weight = kdn::scratch(3 * n), *x = weight + n, *g = x + n;
  load_plain(weight, a.weight, a.value, n);
  for (int64_t t = w.first; t < w.last; ++t) {
    load_row(x, a.x, w.row(a.x, t), n);
    const Vec rho = splat(mean_root(x, n, a.value, a.eps));
    if (a.gate.data) load_row(g, a.gate, w.row(a.gate, t), n);
    for (int64_t i = 0; i < n; i += L) {
      Vec y = load(x + i) * rho * load(weight + i);
      if (a.gate.data) {
        const Vec gate = load(g + i), sigma = conv::sigmoid(gate);
        y *= a.silu ? gate * sigma : sigma;
      }
      store(x + i, y);
    }
    store_row(a.y, w.row(a.y, t), x);
  }
}

inline void read_out_backward(const KdnReadOut& a, int64_t task, int64_t pieces) {
  const Piece w(a, task, pieces);
  const int64_t n = w.width;
  float *weight = kdn::scratch(5 * n), *x = weight + n, *g = x + n, *d = g + n, *d_weight = d + n;
  load_plain(weight, a.weight, a.value, n);
  std::memset(d_weight, 0, n * 4);
  for (int64_t t = w.first; t < w.last; ++t) {
    load_row(x, a.x, w.row(a.x, t), n);
    load_row(d, a.d_y, w.row(a.d_y, t), n);
    const Vec rho = splat(mean_root(x, n, a.value, a.eps));
    if (a.gate.data) {
      load_row(g, a.gate, w.row(a.gate, t), n);
      for (int64_t i = 0; i < n; i += L) {
        const Vec gate = load(g + i), sigma = conv::sigmoid(gate), dy = load(d + i);
        const Vec open = a.silu ? gate * sigma : sigma;
        const Vec slope = a.silu ? sigma + open * (splat(1.f) - sigma) : sigma * (splat(1.f) - sigma);
        store(g + i, dy * load(x + i) * rho * load(weight + i) * slope);
        store(d + i, dy * open);
      }
      store_row(a.d_gate, w.row(a.d_gate, t), g);
    }
    Vec along{};
    for (int64_t i = 0; i < n; i += L) {
      const Vec unit = load(x + i) * rho, d_normed = load(d + i);
      store(d_weight + i, load(d_weight + i) + d_normed * unit);
      store(d + i, d_normed * load(weight + i));
      along += d_normed * load(weight + i) * unit;
    }
    const Vec share = splat(sum(along) / a.value);
    for (int64_t i = 0; i < n; i += L) store(x + i, rho * (load(d + i) - load(x + i) * rho * share));
    store_row(a.d_x, w.row(a.d_x, t), x);
  }
  std::memcpy(a.d_weight + task * a.value, d_weight, a.value * 4);
}

inline void swiglu_forward(const KdnSwiGLU& a, int64_t batch, int64_t t) {
  const int64_t n = round_up(a.gate.channels, L);
  float *g = kdn::scratch(2 * n), *u = g + n;
  load_row(g, a.gate, offset(a.gate, batch, t, 0), n);
  load_row(u, a.up, offset(a.up, batch, t, 0), n);
  for (int64_t i = 0; i < n; i += L) store(g + i, load(g + i) * conv::sigmoid(load(g + i)) * load(u + i));
  store_row(a.y, offset(a.y, batch, t, 0), g);
}

inline void swiglu_backward(const KdnSwiGLU& a, int64_t batch, int64_t t) {
  const int64_t n = round_up(a.gate.channels, L);
  float *g = kdn::scratch(3 * n), *u = g + n, *d = u + n;
  load_row(g, a.gate, offset(a.gate, batch, t, 0), n);
  load_row(u, a.up, offset(a.up, batch, t, 0), n);
  load_row(d, a.d_y, offset(a.d_y, batch, t, 0), n);
  for (int64_t i = 0; i < n; i += L) {
    const Vec gate = load(g + i), sigma = conv::sigmoid(gate), open = gate * sigma, dy = load(d + i);
    store(g + i, dy * load(u + i) * (sigma + open * (splat(1.f) - sigma)));
    store(u + i, dy * open);
  }
  store_row(a.d_gate, offset(a.d_gate, batch, t, 0), g);
  store_row(a.d_up, offset(a.d_up, batch, t, 0), u);
}

template <typename A, void (*Work)(const A&, int64_t)>
void each(const A* a, int threads) {
  kdn::parallel(a->batch * a->heads, threads, [&](int64_t i) { Work(*a, i); });
}
template <typename A, void (*Work)(const A&, int64_t, int64_t)>
void each_piece(const A* a, int threads) {
  const int64_t pieces = (a->time + KDN_PIECE - 1) / KDN_PIECE;
  kdn::parallel(a->batch * a->heads * pieces, threads, [&](int64_t i) { Work(*a, i, pieces); });
}
template <void (*Work)(const KdnSwiGLU&, int64_t, int64_t)>
void swiglu(const KdnSwiGLU* a, int threads) {
  const int64_t pieces = (a->time + KDN_PIECE - 1) / KDN_PIECE;
  kdn::parallel(a->batch * pieces, threads, [&](int64_t i) {
    const int64_t first = i % pieces * KDN_PIECE;
    const int64_t last = first + KDN_PIECE < a->time ? first + KDN_PIECE : a->time;
    for (int64_t t = first; t < last; ++t) Work(*a, i / pieces, t);
  });
}

}  // namespace layer
}  // namespace KDN_NAMESPACE
