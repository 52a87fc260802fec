// The C interface of the CPU kernels: plain structs of pointers, no torch and no Python.
//
// One task is one sequence and head. Every tensor is [batch, time, heads, channels] with the channels
// next to one another; the other strides are free. Packed sequences have batch 0 and offsets.
#pragma once
#include <cstdint>

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

// Tokens between checkpoints: the caller allocates ceil(length / this) rows per sequence.
int64_t kdn_memory_chunk(void);
int64_t kdn_gain_chunk(void);

const char* kdn_isa(void);                // the instruction set in use
int kdn_set_isa(const char* name);        // "avx512", "avx2", "baseline"; 0 if this machine lacks it
void kdn_set_threads(void* gomp_parallel);  // torch's own OpenMP entry, or nullptr: plain threads

void kdn_memory_forward(const KdnMemory*, int threads);
void kdn_memory_backward(const KdnMemory*, int threads);
void kdn_diagonal_forward(const KdnGain*, int threads);
void kdn_diagonal_backward(const KdnGain*, int threads);
void kdn_isotropic_forward(const KdnGain*, int threads);
void kdn_isotropic_backward(const KdnGain*, int threads);
void kdn_exact_forward(const KdnGain*, int threads);
void kdn_exact_backward(const KdnGain*, int threads);
}
