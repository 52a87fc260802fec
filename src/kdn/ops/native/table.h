// The kernels of one instruction set, as pointers: what dispatch.cpp chooses between.
#pragma once
#include "kdn.h"

namespace kdn {

struct Kernels {
  const char* name;
  void (*memory_forward)(const KdnMemory*, int);
  void (*memory_backward)(const KdnMemory*, int);
  void (*decode)(const KdnDecode*, int);
  void (*conv_forward)(const KdnConv*, int);
  void (*conv_backward)(const KdnConv*, int);
  void (*decay_forward)(const KdnDecay*, int);
  void (*decay_backward)(const KdnDecay*, int);
  void (*read_out_forward)(const KdnReadOut*, int);
  void (*read_out_backward)(const KdnReadOut*, int);
  void (*swiglu_forward)(const KdnSwiGLU*, int);
  void (*swiglu_backward)(const KdnSwiGLU*, int);
  void (*matrix_vector)(const KdnRows& weight, const KdnRows& x, const KdnRows& bias, const KdnRows& y, int);
  void (*softmax_loss)(const KdnLoss*, int);
  void (*gain[3][2])(const KdnGain*, int);  // [diagonal, isotropic, exact][forward, backward]
  double (*fma_peak)();
};

}  // namespace kdn
