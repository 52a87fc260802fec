// Picks the instruction set of this machine and forwards the C interface to its kernels.
#include <cstring>

#include "table.h"

namespace kdn {

extern const Kernels baseline;
#ifdef KDN_X86
extern const Kernels avx512, avx2;
#endif

namespace {

const Kernels* find(const char* name) {
#ifdef KDN_X86
  __builtin_cpu_init();
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") &&
                          __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                          __builtin_cpu_supports("avx512dq");
  if (has_avx512 && (!name || !std::strcmp(name, "avx512"))) return &avx512;
  if (has_avx2 && (!name || !std::strcmp(name, "avx2"))) return &avx2;
#endif
  if (!name || !std::strcmp(name, "baseline")) return &baseline;
  return nullptr;
}

const Kernels*& current() {
  static const Kernels* kernels = find(nullptr);
  return kernels;
}

}  // namespace
}  // namespace kdn

extern "C" {

const char* kdn_isa(void) { return kdn::current()->name; }

int kdn_set_isa(const char* name) {
  const kdn::Kernels* kernels = kdn::find(name);
  if (kernels) kdn::current() = kernels;
  return kernels != nullptr;
}

double kdn_fma_peak(void) { return kdn::current()->fma_peak(); }

void kdn_memory_forward(const KdnMemory* m, int threads) { kdn::current()->memory_forward(m, threads); }
void kdn_memory_backward(const KdnMemory* m, int threads) { kdn::current()->memory_backward(m, threads); }
void kdn_decode(const KdnDecode* d, int threads) { kdn::current()->decode(d, threads); }
void kdn_conv_forward(const KdnConv* c, int threads) { kdn::current()->conv_forward(c, threads); }
void kdn_conv_backward(const KdnConv* c, int threads) { kdn::current()->conv_backward(c, threads); }
void kdn_decay_forward(const KdnDecay* d, int threads) { kdn::current()->decay_forward(d, threads); }
void kdn_decay_backward(const KdnDecay* d, int threads) { kdn::current()->decay_backward(d, threads); }
void kdn_read_out_forward(const KdnReadOut* r, int threads) { kdn::current()->read_out_forward(r, threads); }
void kdn_read_out_backward(const KdnReadOut* r, int threads) { kdn::current()->read_out_backward(r, threads); }
void kdn_swiglu_forward(const KdnSwiGLU* s, int threads) { kdn::current()->swiglu_forward(s, threads); }
void kdn_swiglu_backward(const KdnSwiGLU* s, int threads) { kdn::current()->swiglu_backward(s, threads); }
void kdn_matrix_vector(const void* weight, int64_t stride, int64_t rows, int64_t n, const void* x, const void* bias, void* y,
                       KdnType type, int threads) {
  auto row = [&](const void* data, int64_t channels) {
    return KdnRows{const_cast<void*>(data), 0, stride, 0, type, (int32_t)channels};
  };
  kdn::current()->matrix_vector(row(weight, n), row(x, n), row(bias, rows), row(y, rows), threads);
}
void kdn_softmax_loss(const KdnLoss* l, int threads) { kdn::current()->softmax_loss(l, threads); }
void kdn_diagonal_forward(const KdnGain* g, int threads) { kdn::current()->gain[0][0](g, threads); }
void kdn_diagonal_backward(const KdnGain* g, int threads) { kdn::current()->gain[0][1](g, threads); }
void kdn_isotropic_forward(const KdnGain* g, int threads) { kdn::current()->gain[1][0](g, threads); }
void kdn_isotropic_backward(const KdnGain* g, int threads) { kdn::current()->gain[1][1](g, threads); }
void kdn_exact_forward(const KdnGain* g, int threads) { kdn::current()->gain[2][0](g, threads); }
void kdn_exact_backward(const KdnGain* g, int threads) { kdn::current()->gain[2][1](g, threads); }

int64_t kdn_chunk(void) { return KDN_CHUNK; }
int64_t kdn_piece(void) { return KDN_PIECE; }
}
