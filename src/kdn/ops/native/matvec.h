// A matrix times a vector, y = W x + b, as decoding one sequence needs it: bound by the reading of W, once.
#pragma once
#include "simd.h"
#include "threads.h"

namespace KDN_NAMESPACE {
namespace matvec {

constexpr int64_t ROWS = 64;         // of a task
constexpr int64_t SMALL = 1 << 15;   // numbers of a matrix that is not worth waking a thread for

template <typename W>
KDN_INLINE Vec load_weights(const W* p) {
  if constexpr (sizeof(W) == 4)
    return load(p);
  else
    return load_bfloat16(p);
}
KDN_INLINE float number(const float* p) { return *p; }
KDN_INLINE float number(const uint16_t* p) {
  const uint32_t bits = (uint32_t)*p << 16;
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

// One row of W, in four sums, since one alone would wait for itself. Rows follow one another, so all of W is one stream;
// what lies AHEAD of it is asked for.
constexpr int64_t AHEAD = 4096;  // bytes

template <typename W>
KDN_INLINE float row(const W* w, const float* x, int64_t n) {
  constexpr int N = 4;
  Vec sums[N] = {};
  int64_t i = 0;
  for (; i + N * L <= n; i += N * L) {
    for (size_t at = 0; at < N * L * sizeof(W); at += 64) prefetch((const char*)(w + i) + AHEAD + at);
    KDN_UNROLL
    for (int j = 0; j < N; ++j) sums[j] += load(x + i + j * L) * load_weights(w + i + j * L);
  }
  for (; i + L <= n; i += L) sums[0] += load(x + i) * load_weights(w + i);
  float y = sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
  for (; i < n; ++i) y += number(w + i) * x[i];
  return y;
}

struct Given {
  const KdnRows &weight, &x, &bias, &y;
};

template <typename W>
void work(const Given& a, int64_t task) {
  const int64_t first = task * ROWS, n = a.x.channels, out = a.y.channels;
  const int64_t last = first + ROWS < out ? first + ROWS : out, width = round_up(n, L);
  float *x = kdn::scratch(width + 2 * ROWS), *y = x + width, *bias = y + ROWS;
  load_row(x, a.x, 0, width);
  const W* w = (const W*)a.weight.data;
  for (int64_t r = first; r < last; ++r) y[r - first] = row(w + r * a.weight.time, x, n);
  KdnRows part = a.y;
  part.channels = (int32_t)(last - first);
  if (a.bias.data != nullptr) {
    KdnRows given = a.bias;
    given.channels = part.channels;
    load_row(bias, given, first, ROWS);
    for (int64_t i = 0; i < ROWS; ++i) y[i] += bias[i];
  }
  store_row(part, first, y);
}

}  // namespace matvec

inline void matrix_vector(const KdnRows& weight, const KdnRows& x, const KdnRows& bias, const KdnRows& y,
                          int threads) {
  const int64_t tasks = (y.channels + matvec::ROWS - 1) / matvec::ROWS;
  if ((int64_t)y.channels * x.channels < matvec::SMALL) threads = 1;
  auto* work = weight.type == KDN_FLOAT32 ? matvec::work<float> : matvec::work<uint16_t>;
  const matvec::Given given{weight, x, bias, y};
  kdn::parallel(tasks, threads, [&](int64_t i) { work(given, i); });
}

}  // namespace KDN_NAMESPACE
