// One token for every sequence and head: the gain, then the memory, both states updated in place.
//
// The state is read once from memory and written once; the second pass over its rows finds them in cache.
#pragma once
#include "simd.h"
#include "threads.h"

namespace KDN_NAMESPACE {

struct DecodeRows {
  float *q, *k, *g, *decay, *v, *out;
};

// g and the covariance after the token; `decay` is α, `noise` room for ω.
KDN_INLINE void decode_gain(const KdnDecode& d, int64_t b, int64_t h, const DecodeRows& x, float* noise,
                            int64_t width) {
  const float mu = d.info_scale[h];
  float one[L];
  load_row(one, d.obs, offset(d.obs, b, 0, h), L);
  const float r = one[0];
  load_row(noise, d.noise, offset(d.noise, b, 0, h), d.kind == KDN_DIAGONAL ? width : L);
  if (d.kind == KDN_DIAGONAL) {
    float* p = d.cov + (b * d.heads + h) * d.key;
    Vec z{};
    for (int64_t i = 0; i < width; i += L) {  // p̂ into g for now
      const int64_t n = d.key - i < L ? d.key - i : L;
      Vec before{};
      std::memcpy(&before, p + i, n * 4);
      const Vec a = load(x.decay + i), k = load(x.k + i);
      const Vec prior = a * a * before + load(noise + i);
      store(x.g + i, prior);
      z += prior * k * k;
      const Vec after = prior / (splat(1.f) + splat(mu / r) * k * k * prior);
      std::memcpy(p + i, &after, n * 4);
    }
    const Vec inverse = splat(1.f / (r + sum(z)));
    for (int64_t i = 0; i < width; i += L)
      store(x.g + i, load(x.g + i) * load(x.k + i) * inverse);
  } else {
    float* cov = d.cov + b * d.heads + h;
    Vec a2{}, norm2{};
    for (int64_t i = 0; i < width; i += L) {
      const Vec a = load(x.decay + i), k = load(x.k + i);
      a2 += a * a;
      norm2 += k * k;
    }
    // Beyond the last channel α is 1, not 0.
    const float mean = (sum(a2) - (float)(width - d.key)) / (float)d.key, square = sum(norm2);
    const float prior = mean * *cov + noise[0];
    *cov = prior / (1.f + mu / r * square / (float)d.key * prior);
    const Vec beta = splat(prior / (r + prior * square));
    for (int64_t i = 0; i < width; i += L) store(x.g + i, beta * load(x.k + i));
  }
}

// N vectors of columns of S [K, V], from column `at`.
template <int N>
KDN_INLINE void decode_columns(float* s, const KdnDecode& d, const DecodeRows& x, int64_t at) {
  Vec e[N], o[N] = {};
  KDN_UNROLL
  for (int n = 0; n < N; ++n) e[n] = load(x.v + at + n * L);
  if (d.k.data != nullptr)
    for (int64_t i = 0; i < d.key; ++i) {
      const Vec k = splat(x.k[i] * x.decay[i]);
      KDN_UNROLL
      for (int n = 0; n < N; ++n) e[n] -= k * load(s + i * d.value + at + n * L);
    }
  for (int64_t i = 0; i < d.key; ++i) {
    const Vec a = splat(x.decay[i]), g = splat(x.g[i]), q = splat(x.q[i]);
    KDN_UNROLL
    for (int n = 0; n < N; ++n) {
      float* p = s + i * d.value + at + n * L;
      const Vec row = a * load(p) + g * e[n];
      store(p, row);
      o[n] += q * row;
    }
  }
  KDN_UNROLL
  for (int n = 0; n < N; ++n) store(x.out + at + n * L, o[n]);
}

inline void decode_head(const KdnDecode& d, int64_t task) {
  const int64_t b = task / d.heads, h = task % d.heads;
  const int64_t width = round_up(d.key, L), columns = round_up(d.value, L);
  float* room = kdn::scratch(5 * width + 2 * columns + L);
  DecodeRows x{room,
               room + width,
               room + 2 * width,
               room + 3 * width,
               room + 5 * width + L,
               room + 5 * width + L + columns};
  load_row(x.q, d.q, offset(d.q, b, 0, h), width);
  for (int64_t i = 0; i < width; i += L) store(x.q + i, load(x.q + i) * splat(d.scale));
  if (d.k.data != nullptr) load_row(x.k, d.k, offset(d.k, b, 0, h), width);
  load_row(x.v, d.v, offset(d.v, b, 0, h), columns);
  if (d.decay.data == nullptr) {
    for (int64_t i = 0; i < width; i += L) store(x.decay + i, splat(1.f));
  } else {
    load_row(x.decay, d.decay, offset(d.decay, b, 0, h), d.decay.channels == 1 ? L : width);
    const float first = x.decay[0];
    for (int64_t i = 0; i < width; i += L)
      store(x.decay + i, exp(d.decay.channels == 1 ? splat(first) : load(x.decay + i)));
    for (int64_t i = d.key; i < width; ++i) x.decay[i] = 1;
  }
  if (d.kind == KDN_GIVEN)
    load_row(x.g, d.gain, offset(d.gain, b, 0, h), width);
  else
    decode_gain(d, b, h, x, room + 4 * width, width);
  float* s = d.state + task * d.key * d.value;
  int64_t at = 0;
  constexpr int N = L == 16 ? 8 : 4;
  for (; at + N * L <= d.value; at += N * L) decode_columns<N>(s, d, x, at);
  for (; at + L <= d.value; at += L) decode_columns<1>(s, d, x, at);
  for (; at < d.value; ++at) {  // the last few columns, one by one
    float e = x.v[at], o = 0;
    if (d.k.data != nullptr)
      for (int64_t i = 0; i < d.key; ++i) e -= x.k[i] * x.decay[i] * s[i * d.value + at];
    for (int64_t i = 0; i < d.key; ++i) {
      float& cell = s[i * d.value + at];
      cell = x.decay[i] * cell + x.g[i] * e;
      o += x.q[i] * cell;
    }
    x.out[at] = o;
  }
  store_row(d.out, offset(d.out, b, 0, h), x.out);
}

inline void decode(const KdnDecode* d, int threads) {
  kdn::parallel(d->count * d->heads, threads, [&](int64_t i) { decode_head(*d, i); });
}

}  // namespace KDN_NAMESPACE
