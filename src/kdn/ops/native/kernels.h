// All kernels of one instruction set, behind one table; included once by every isa_*.cpp.
#pragma once
#include "table.h"
#include "memory_backward.h"

namespace KDN_NAMESPACE {

inline void memory_forward(const KdnMemory* m, int threads) {
  const int64_t heads = m->sequences.count * m->heads, columns = round_up(m->value, L);
  // Few heads: cut their columns too. Block borders are the same either way, and so are all sums.
  int64_t cuts = 1;
  const int64_t block = WIDE * L;
  while (heads * cuts < threads && cuts * block < columns) cuts *= 2;
  const int64_t step = round_up((columns + cuts - 1) / cuts, block);
  cuts = (columns + step - 1) / step;
  kdn::parallel(heads * cuts, threads, [&](int64_t i) {
    const int64_t first = i % cuts * step, last = first + step < columns ? first + step : columns;
    forward(*m, i / cuts, first, last);
  });
}

inline void memory_backward(const KdnMemory* m, int threads) {
  kdn::parallel(m->sequences.count * m->heads, threads, [&](int64_t i) { backward(*m, i); });
}

}  // namespace KDN_NAMESPACE
