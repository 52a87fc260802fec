// Cross entropy of a language model's head, a row of logits at a time and in place:
//
//     −log softmax(x)[label]        x ← softmax(x) − onehot(label), if asked for
#pragma once
#include <cmath>

#include "simd.h"
#include "threads.h"

namespace KDN_NAMESPACE {

inline void softmax_loss(const KdnLoss* a, int threads) {
  kdn::parallel(a->rows, threads, [&](int64_t t) {
    const int64_t n = round_up(a->logits.channels, L), label = a->labels[t];
    float* x = kdn::scratch(n);
    load_row(x, a->logits, t * a->logits.time, n);
    for (int64_t i = a->logits.channels; i < n; ++i) x[i] = -INFINITY;
    Vec largest = load(x);
    for (int64_t i = L; i < n; i += L) largest = load(x + i) > largest ? load(x + i) : largest;
    float lanes[L], most = -INFINITY;
    store(lanes, largest);
    for (int j = 0; j < L; ++j) most = lanes[j] > most ? lanes[j] : most;
    const float given = x[label];
    const Vec shift = splat(most);
    Vec total{};
    for (int64_t i = 0; i < n; i += L) {
      const Vec e = exp(load(x + i) - shift);
      total += e;
      store(x + i, e);
    }
    const float all = sum(total);
    a->loss[t] = std::log(all) + (most - given);
    if (!a->gradient) return;
    const Vec share = splat(1 / all);
    for (int64_t i = 0; i < n; i += L) store(x + i, load(x + i) * share);
    x[label] -= 1;
    store_row(a->logits, t * a->logits.time, x);
  });
}

}  // namespace KDN_NAMESPACE
