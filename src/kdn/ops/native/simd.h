// Vectors of KDN_LANES floats by compiler extension, and what the kernels need of them.
//
// This header is compiled once per instruction set, each time in a namespace of its own (KDN_NAMESPACE).
#pragma once
#include <cstdint>
#include <cstring>
#include <utility>

#include "kdn.h"

#define KDN_INLINE inline __attribute__((always_inline))
#define KDN_UNROLL _Pragma("GCC unroll 16")

namespace KDN_NAMESPACE {

constexpr int L = KDN_LANES;
typedef float Vec __attribute__((vector_size(L * 4)));
typedef int32_t VecInt __attribute__((vector_size(L * 4)));
typedef uint32_t VecBits __attribute__((vector_size(L * 4)));
typedef uint16_t VecHalf __attribute__((vector_size(L * 2)));

constexpr int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

KDN_INLINE Vec load(const float* p) {
  Vec x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
KDN_INLINE void store(float* p, Vec x) { std::memcpy(p, &x, sizeof x); }
// x − 0 is x for every x, −0 and NaN included, so this compiles to a broadcast alone.
KDN_INLINE Vec splat(float x) { return x - Vec{}; }

// Asks for a cache line, into the second level: of rows a power of two apart the first holds only a few. By assembly,
// since GCC takes a function that does nothing but __builtin_prefetch for one without effect, and drops its calls.
KDN_INLINE void prefetch(const void* p) {
#if defined(__x86_64__) || defined(__i386__)
  __asm__ volatile("prefetcht1 %0" : : "m"(*(const char*)p));
#elif defined(__aarch64__)
  __asm__ volatile("prfm pldl1keep, %0" : : "Q"(*(const char*)p));
#else
  __builtin_prefetch(p);
#endif
}

KDN_INLINE float sum(Vec x) {
  // Halves added until one lane is left: a fixed order, the same at every call.
  float lanes[L];
  store(lanes, x);
  KDN_UNROLL
  for (int width = L / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  return lanes[0];
}

// exp for x ≤ 88, to about 1 ulp; below −87.3, where float32 has only denormals left, 0.
KDN_INLINE Vec exp(Vec x) {
  const Vec low = splat(-87.33f);
  Vec clamped = x > low ? x : low;
  const Vec magic = splat(12582912.f);  // 1.5 · 2²³: adding it rounds to an integer
  Vec shifted = clamped * splat(1.44269504f) + magic;
  Vec n = shifted - magic;
  Vec r = clamped - n * splat(0.693145752f);
  r = r - n * splat(1.42860677e-6f);
  Vec p = splat(1.98756912e-4f);
  p = p * r + splat(1.39819994e-3f);
  p = p * r + splat(8.33345205e-3f);
  p = p * r + splat(4.16657962e-2f);
  p = p * r + splat(1.66666657e-1f);
  p = p * r + splat(0.5f);
  p = p * (r * r) + r + splat(1.f);
  VecInt exponent = (__builtin_convertvector(n, VecInt) + 127) << 23;
  Vec result = p * (Vec)exponent;
  result = x > low ? result : Vec{};
  return x == x ? result : x;  // NaN stays NaN
}

// --- rows of float32 or bfloat16 ---

KDN_INLINE Vec load_bfloat16(const uint16_t* p) {
  VecHalf half;
  std::memcpy(&half, p, sizeof half);
  return (Vec)(__builtin_convertvector(half, VecBits) << 16);
}
KDN_INLINE uint16_t round_bfloat16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if (x != x) return 0x7fc0;
  return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);  // to nearest, ties to even
}
KDN_INLINE VecHalf round_bfloat16(Vec x) {
  VecBits bits = (VecBits)x;
  VecBits rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  rounded = x == x ? rounded : (VecBits{} + 0x7fc0);
  return __builtin_convertvector(rounded, VecHalf);
}

KDN_INLINE int64_t offset(const KdnRows& x, int64_t batch, int64_t time, int64_t head) {
  return batch * x.batch + time * x.time + head * x.head;
}

// One row of a tensor as float32; from its end to `padded`, zeros.
KDN_INLINE void load_row(float* to, const KdnRows& x, int64_t at, int64_t padded) {
  const int64_t n = x.channels;
  int64_t i = 0;
  if (x.type == KDN_FLOAT32) {
    const float* from = (const float*)x.data + at;
    for (; i + L <= n; i += L) store(to + i, load(from + i));
    for (; i < n; ++i) to[i] = from[i];
  } else {
    const uint16_t* from = (const uint16_t*)x.data + at;
    for (; i + L <= n; i += L) store(to + i, load_bfloat16(from + i));
    for (; i < n; ++i) {
      uint32_t bits = (uint32_t)from[i] << 16;
      std::memcpy(to + i, &bits, 4);
    }
  }
  for (; i < padded; ++i) to[i] = 0;
}

KDN_INLINE void store_row(const KdnRows& x, int64_t at, const float* from) {
  const int64_t n = x.channels;
  int64_t i = 0;
  if (x.type == KDN_FLOAT32) {
    float* to = (float*)x.data + at;
    for (; i + L <= n; i += L) store(to + i, load(from + i));
    for (; i < n; ++i) to[i] = from[i];
  } else {
    uint16_t* to = (uint16_t*)x.data + at;
    for (; i + L <= n; i += L) {
      VecHalf half = round_bfloat16(load(from + i));
      std::memcpy(to + i, &half, sizeof half);
    }
    for (; i < n; ++i) to[i] = round_bfloat16(from[i]);
  }
}

// --- many sums at once: L vectors to one, lane i holding the sum of vector i ---

template <int Width, bool High, int... I>
KDN_INLINE Vec pick(Vec a, Vec b, std::integer_sequence<int, I...>) {
  // Both vectors hold segments of 2·Width lanes; take the low or the high Width lanes of each.
  return __builtin_shufflevector(
      a, b,
      ((I / Width < L / (2 * Width) ? 0 : L) + (I / Width % (L / (2 * Width))) * 2 * Width + I % Width +
       (High ? Width : 0))...);
}
template <int Width>
KDN_INLINE Vec fold(Vec a, Vec b) {
  using Lanes = std::make_integer_sequence<int, L>;
  return pick<Width, false>(a, b, Lanes{}) + pick<Width, true>(a, b, Lanes{});
}
template <int Count>
KDN_INLINE Vec sums_of(const Vec* x) {
  if constexpr (Count == 1) {
    return x[0];
  } else {
    return fold<L / Count>(sums_of<Count / 2>(x), sums_of<Count / 2>(x + Count / 2));
  }
}
KDN_INLINE Vec sums(const Vec* x) { return sums_of<L>(x); }

}  // namespace KDN_NAMESPACE
