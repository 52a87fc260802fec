// The kernels of one instruction set, as pointers: what dispatch.cpp chooses between.
#pragma once
#include "kdn.h"

namespace kdn {

struct Kernels {
  const char* name;
  void (*memory_forward)(const KdnMemory*, int);
  void (*memory_backward)(const KdnMemory*, int);
  void (*decode)(const KdnDecode*, int);
  void (*gain[3][2])(const KdnGain*, int);  // [diagonal, isotropic, exact][forward, backward]
  double (*fma_peak)();
};

}  // namespace kdn
