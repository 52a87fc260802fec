// All kernels of one instruction set, behind one table; included once by every isa_*.cpp.
#pragma once
#include <chrono>

#include "conv.h"
#include "decode.h"
#include "exact.h"
#include "gain.h"
#include "layer.h"
#include "loss.h"
#include "matvec.h"
#include "memory_backward.h"
#include "table.h"

namespace KDN_NAMESPACE {

// Pieces per head that its columns are cut into where there are fewer heads than threads. The blocks of
// columns are the same either way, and so are all sums.
inline int64_t column_cuts(const KdnMemory* m, int threads) {
  const int64_t heads = m->sequences.count * m->heads, block = WIDE * L;
  const int64_t most = (round_up(m->value, L) + block - 1) / block;
  const int64_t wanted = heads < threads ? (threads + heads - 1) / heads : 1;
  return wanted < most ? wanted : most;
}

inline void memory_forward(const KdnMemory* m, int threads) {
  const int64_t columns = round_up(m->value, L);
  int64_t cuts = column_cuts(m, threads);
  const int64_t step = round_up((columns + cuts - 1) / cuts, WIDE * L);
  cuts = (columns + step - 1) / step;
  const Sharing sharing(m->sequences.count, m->heads, cuts, threads);
  kdn::parallel(sharing.tasks * cuts, threads, [&](int64_t i) {
    const int64_t first = i % cuts * step, last = first + step < columns ? first + step : columns;
    forward(*m, sharing[i / cuts], first, last);
  });
}

inline void memory_backward(const KdnMemory* m, int threads) {
  const int64_t cuts = column_cuts(m, threads);
  if (cuts > 1) return backward_cut(*m, threads, cuts);
  const Sharing sharing(m->sequences.count, m->heads, 1, threads);
  kdn::parallel(sharing.tasks, threads, [&](int64_t i) { backward(*m, sharing[i]); });
}

template <void (*Task)(const KdnGain&, Heads)>
void each_group(const KdnGain* g, int threads) {
  const Sharing sharing(g->sequences.count, g->heads, 1, threads);
  kdn::parallel(sharing.tasks, threads, [&](int64_t i) { Task(*g, sharing[i]); });
}
template <void (*Task)(const KdnGain&, int64_t)>
void each_head(const KdnGain* g, int threads) {
  kdn::parallel(g->sequences.count * g->heads, threads, [&](int64_t i) { Task(*g, i); });
}

// flop/s of one core doing multiply-adds on registers: the best of five short runs.
inline double fma_peak() {
  constexpr int chains = 12;
  constexpr long rounds = 4000000;
  double best = 0;
  for (int run = 0; run < 5; ++run) {
    Vec x[chains];
    for (int i = 0; i < chains; ++i) x[i] = splat((float)i);
    const Vec a = splat(0.999f), b = splat(1e-3f);
    const auto start = std::chrono::steady_clock::now();
    for (long r = 0; r < rounds; ++r) {
      KDN_UNROLL
      for (int i = 0; i < chains; ++i) x[i] = x[i] * a + b;
      __asm__ volatile("" : : "r"(r));
    }
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    for (int i = 1; i < chains; ++i) x[0] += x[i];
    volatile float used = sum(x[0]);
    (void)used;
    const double rate = 2.0 * L * chains * rounds / seconds.count();
    best = rate > best ? rate : best;
  }
  return best;
}

constexpr kdn::Kernels kernels(const char* name) {
  return {name,
          memory_forward,
          memory_backward,
          decode,
          conv_forward,
          conv_backward,
          layer::each<KdnDecay, layer::decay_forward>,
          layer::each<KdnDecay, layer::decay_backward>,
          layer::each_piece<KdnReadOut, layer::read_out_forward>,
          layer::each_piece<KdnReadOut, layer::read_out_backward>,
          layer::swiglu<layer::swiglu_forward>,
          layer::swiglu<layer::swiglu_backward>,
          matrix_vector,
          softmax_loss,
          {{each_group<diagonal_forward>, each_group<diagonal_backward>},
           {each_group<isotropic_forward>, each_group<isotropic_backward>},
           {each_head<exact_forward>, each_head<exact_backward>}},
          fma_peak};
}

}  // namespace KDN_NAMESPACE
