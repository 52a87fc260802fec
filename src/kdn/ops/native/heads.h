// Which heads a task takes through the sequence together.
//
// Neighbouring heads' rows share pages. One head alone would touch a page per row and tensor, more of them than
// the processor keeps translations of; several heads, a tile of tokens at a time, touch the same pages together.
#pragma once
#include <cstdint>

#include "kdn.h"

namespace KDN_NAMESPACE {

constexpr int64_t MOST_HEADS = 8;

struct Heads {
  int64_t first, count;  // `first` counts heads over all sequences; all are of one sequence
};

// A task's order: all heads' first tile, all heads' second tile, … (direction −1: from the last tile).
struct Turn {
  int64_t head, tile;
};
inline Turn next_turn(Turn x, const Heads& heads, int64_t direction) {
  return x.head + 1 < heads.count ? Turn{x.head + 1, x.tile} : Turn{0, x.tile + direction};
}

// The heads of `count` sequences shared out to tasks of `together` heads.
struct Sharing {
  int64_t heads, together, tasks;

  // As many together as leave no thread with more to do than others. `cuts`: pieces a head is cut into anyway.
  Sharing(int64_t count, int64_t heads, int64_t cuts, int threads) : heads(heads), together(1), tasks(0) {
    int64_t shortest = 0;
    for (int64_t n = 1; n <= MOST_HEADS && n <= heads; ++n) {
      const int64_t number = count * ((heads + n - 1) / n), longest = (number * cuts + threads - 1) / threads * n;
      if (n == 1 || longest <= shortest) together = n, shortest = longest, tasks = number;
    }
  }
  Heads operator[](int64_t task) const {
    const int64_t groups = (heads + together - 1) / together, first = task % groups * together;
    return {task / groups * heads + first, first + together < heads ? together : heads - first};
  }
};

}  // namespace KDN_NAMESPACE
