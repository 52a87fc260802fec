// The C interface of the CPU kernels: plain structs of pointers, no torch and no Python.
//
// One task is one sequence and head. Every tensor is [batch, time, heads, channels] with the channels
// next to one another; the other strides are free. Packed sequences have batch 0 and offsets.
#pragma once
#include <cstdint>

// Tokens between checkpoints: the caller allocates ceil(length / this) rows per sequence. (The exact gain's
// come every KDN_EXACT_CHUNK tokens, and are matrices of doubles.)
constexpr int64_t KDN_CHUNK = 64;
constexpr int64_t KDN_PIECE = 256;  // tokens of a task where no token needs the one before
constexpr int64_t KDN_EXACT_CHUNK = 32;

#ifdef _WIN32
#define KDN_API __declspec(dllexport)
#else
#define KDN_API __attribute__((visibility("default")))
#endif

extern "C" {

enum KdnType : int32_t { KDN_FLOAT32 = 0, KDN_BFLOAT16 = 1 };

// One tensor with a time axis. data == nullptr: the argument was not given.
struct KdnRows {
  void* data;
  int64_t batch, time, head;  // strides, in elements
  int32_t type;
  int32_t channels;
};

// Which tokens belong together. offsets == nullptr: `count` batch rows of `length` tokens each.
struct KdnSequences {
  const int64_t* offsets;
  int64_t count, length;
};

// The memory. States and checkpoints are contiguous float32, [sequence, head, K, V] and [chunk, head, K, V].
struct KdnMemory {
  KdnSequences sequences;
  int64_t heads, key, value;
  KdnRows q, k, v, gain, decay;
  float scale;
  KdnRows out;
  const float* initial;      // or nullptr: zero
  float* state;              // the final state
  float* checkpoints;        // or nullptr: none are kept
  const int64_t* first_chunk;  // the row in `checkpoints` of every sequence's first chunk
  // Backward only. d_out, d_state and every result may be absent.
  KdnRows d_out;
  const float* d_state;
  KdnRows d_q, d_k, d_v, d_gain, d_decay;
  float* d_initial;
};

// A gain. X is K (diagonal), 1 (isotropic) or K·K (exact) covariance values per sequence and head.
struct KdnGain {
  KdnSequences sequences;
  int64_t heads, key;
  KdnRows k, decay, noise, obs;  // noise: X = K or 1 channels; obs: 1
  const float* info_scale;       // [heads]
  KdnRows gain;
  KdnRows prior;                 // [.., X] float32, or absent
  const float* initial;          // or nullptr: one
  float* cov;
  float* checkpoints;            // [chunk, head, X], or nullptr
  const int64_t* first_chunk;
  // Backward only.
  KdnRows d_gain, d_prior;
  const float* d_cov;
  KdnRows d_k, d_decay, d_noise, d_obs;
  float* d_info_scale;           // [sequence, heads], to be summed by the caller
  float* d_initial;
};

// One token for each of `count` sequences. cov [sequence, head, X] and state [sequence, head, K, V] are
// float32 and updated in place. kind says where the gain comes from.
enum KdnKind : int32_t { KDN_GIVEN = 0, KDN_DIAGONAL = 1, KDN_ISOTROPIC = 2 };
struct KdnDecode {
  int64_t count, heads, key, value;
  KdnRows q, k, v, decay;
  int32_t kind;
  KdnRows gain;        // if given
  KdnRows noise, obs;  // if not
  const float* info_scale;
  float* cov;
  float* state;
  float scale;
  KdnRows out;
};

// Short convolutions, with SiLU and rows of length one if asked for. history [sequence, width − 1, heads, key] and
// weight [width, heads, key] (the newest token's last) are float32, and so are their gradients.
struct KdnConv {
  KdnSequences sequences;
  int64_t heads, key, width;
  KdnRows x;
  const float* weight;
  const float* history;  // or nullptr: zero
  int32_t activation, unit;
  float eps;
  KdnRows y;
  // Backward only.
  KdnRows d_y, d_x;
  float* d_weight;   // [sequence, width, heads, key], to be summed by the caller
  float* d_history;  // or nullptr
};

// log α = −rate softplus(f + bias): rate [heads], bias [heads, key]; gradients of both per batch row and head.
struct KdnDecay {
  int64_t batch, time, heads, key;
  KdnRows f;
  const float *rate, *bias;
  KdnRows out;
  // Backward only.
  KdnRows d_out, d_f;
  float *d_rate, *d_bias;  // [batch, heads], [batch, heads, key]
};

// RMSNorm of every head's row, times weight [value], and with a gate times its sigmoid or SiLU.
struct KdnReadOut {
  int64_t batch, time, heads, value;
  KdnRows x, gate;
  const float* weight;
  float eps;
  int32_t silu;
  KdnRows y;
  // Backward only.
  KdnRows d_y, d_x, d_gate;
  float* d_weight;  // [batch, heads, pieces, value], pieces = ceil(time / KDN_PIECE)
};

// SiLU(gate) ⊙ up, a row per token.
struct KdnSwiGLU {
  int64_t batch, time;
  KdnRows gate, up, y;
  // Backward only.
  KdnRows d_y, d_gate, d_up;
};

// Cross entropy of rows of logits [rows, classes], which become its gradient if asked for.
struct KdnLoss {
  int64_t rows;
  KdnRows logits;  // its batch and head are not used
  const int64_t* labels;
  float* loss;
  int32_t gradient;
};

KDN_API int64_t kdn_chunk(void);  // KDN_CHUNK
KDN_API int64_t kdn_piece(void);  // KDN_PIECE

KDN_API const char* kdn_isa(void);                // the instruction set in use
KDN_API double kdn_fma_peak(void);            // measured flop/s of one core
KDN_API int kdn_set_isa(const char* name);        // "avx512", "avx2", "baseline"; 0 if this machine lacks it
KDN_API void kdn_set_threads(void* gomp_parallel);  // torch's own OpenMP entry, or nullptr: plain threads

KDN_API void kdn_memory_forward(const KdnMemory*, int threads);
KDN_API void kdn_memory_backward(const KdnMemory*, int threads);
KDN_API void kdn_decode(const KdnDecode*, int threads);
KDN_API void kdn_conv_forward(const KdnConv*, int threads);
KDN_API void kdn_conv_backward(const KdnConv*, int threads);
KDN_API void kdn_decay_forward(const KdnDecay*, int threads);
KDN_API void kdn_decay_backward(const KdnDecay*, int threads);
KDN_API void kdn_read_out_forward(const KdnReadOut*, int threads);
KDN_API void kdn_read_out_backward(const KdnReadOut*, int threads);
KDN_API void kdn_swiglu_forward(const KdnSwiGLU*, int threads);
KDN_API void kdn_swiglu_backward(const KdnSwiGLU*, int threads);
// y = W x + b: W [rows, n], `stride` numbers from row to row; x, b (or nullptr) and y are of W's type. No struct, since
// one row of a small matrix is done sooner than a struct is filled from Python.
KDN_API void kdn_matrix_vector(const void* weight, int64_t stride, int64_t rows, int64_t n, const void* x, const void* bias,
                               void* y, KdnType type, int threads);
KDN_API void kdn_softmax_loss(const KdnLoss*, int threads);
KDN_API void kdn_diagonal_forward(const KdnGain*, int threads);
KDN_API void kdn_diagonal_backward(const KdnGain*, int threads);
KDN_API void kdn_isotropic_forward(const KdnGain*, int threads);
KDN_API void kdn_isotropic_backward(const KdnGain*, int threads);
KDN_API void kdn_exact_forward(const KdnGain*, int threads);
KDN_API void kdn_exact_backward(const KdnGain*, int threads);
}
