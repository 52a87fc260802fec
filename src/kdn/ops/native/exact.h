// The exact filter: one dense covariance per sequence and head, token by token, all of it in double.
//
//     P̂ = (α αᵀ) ⊙ P₋ + diag(ω)      h = P̂ k      z = kᵀh      g = h/(r + z)
//     P = P̂ − u uᵀ                    u = √c h      c = μ/(r + μ z)
//
// A float holds variances down to 10⁻⁷ of the largest only, and a token leaves r/‖k‖² along its key. Where
// even a double has nothing left (z ≤ 0 by rounding) the direction counts as known: no gain, no update.
//
// P is never formed between tokens: one pass over the matrix subtracts the last token's u uᵀ, decays it and
// sums h over its rows, so each token reads and writes K² numbers once. u uᵀ and α αᵀ are products of the
// same two numbers on both sides of the diagonal, so P stays symmetric to the last bit, a row is a column,
// and every product with P is a sum of rows: nothing is summed across lanes.
//
// Backward, per chunk of EXACT_CHUNK tokens from the last to the first: M = (α αᵀ) ⊙ P₋ of its tokens are
// recomputed from a checkpoint, then, with D = ∂P̂, and ∂P like it symmetric,
//
//     e = ∂P h    ∂c = −hᵀe    ∂γ = −∂gᵀh/(r + z)²    ∂z = ∂γ − c² ∂c    x = ∂h = ∂g/(r + z) − 2c e + ∂z k
//     D = ∂P + (x kᵀ + k xᵀ)/2 + ∂prior       ∂P₋ = (α αᵀ) ⊙ D       ∂ω = diag(D)
//     ∂k = ∂z h + M x + ω ⊙ x               ∂log α = 2 (D ⊙ M) 1
//     ∂r = ∂γ − ∂c μ/(r + μ z)²              ∂μ = ∂c r/(r + μ z)²
//
// again in one pass over ∂P and M, which also sums e of the token before. M leaves ω out because a decay's
// gradient is what remains without it: of P̂, a strong decay may leave M below the rounding of ω.
#pragma once
#include <cmath>

#include "simd.h"
#include "threads.h"

namespace KDN_NAMESPACE {

constexpr int64_t EXACT_CHUNK = KDN_EXACT_CHUNK;  // tokens between checkpoints

namespace exact {

constexpr int D = L / 2;
typedef double Vec2 __attribute__((vector_size(L * 4)));  // as wide as Vec, half the lanes

KDN_INLINE Vec2 load(const double* p) {
  Vec2 x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
KDN_INLINE void store(double* p, Vec2 x) { std::memcpy(p, &x, sizeof x); }
KDN_INLINE Vec2 splat(double x) { return x - Vec2{}; }

KDN_INLINE double dot(const double* x, const double* y, int64_t width) {
  Vec2 products{};
  for (int64_t i = 0; i < width; i += D) products += load(x + i) * load(y + i);
  double total = 0;
  for (int i = 0; i < D; ++i) total += products[i];
  return total;
}

// One task's sequence and head, and its tokens. Rows are `width` doubles, matrices K such rows; the padding
// has k = 0, ω = 0, α = 1 and P = 0, which changes nothing.
struct Task {
  const KdnGain& g;
  int64_t sequence, head, batch, begin, end;
  int64_t key, width;

  Task(const KdnGain& g, int64_t task)
      : g(g), sequence(task / g.heads), head(task % g.heads), key(g.key), width(round_up(g.key, D)) {
    const KdnSequences& s = g.sequences;
    batch = s.offsets ? 0 : sequence;
    begin = s.offsets ? s.offsets[sequence] : 0;
    end = s.offsets ? s.offsets[sequence + 1] : s.length;
  }
  int64_t matrix() const { return key * width; }
  int64_t state() const { return (sequence * g.heads + head) * key * key; }
  // The struct's float* is a double* here: a checkpoint in float would undo what double is for.
  double* checkpoint(int64_t chunk) const {
    return (double*)g.checkpoints + ((g.first_chunk[sequence] + chunk) * g.heads + head) * key * key;
  }
  int64_t at(const KdnRows& x, int64_t t) const { return offset(x, batch, t, head); }
};

// Doubles of a thread's scratch memory, handed out in multiples of a vector.
struct Room {
  double* next;
  explicit Room(int64_t doubles) : next((double*)kdn::scratch(2 * doubles)) {}
  double* take(int64_t doubles) {
    double* taken = next;
    next += doubles;
    return taken;
  }
};

KDN_INLINE void read_row(double* to, const KdnRows& x, int64_t t, const Task& w, float* room) {
  load_row(room, x, w.at(x, t), w.width);
  for (int64_t i = 0; i < w.width; ++i) to[i] = room[i];
}
// A gradient that nobody asked for has no data.
KDN_INLINE void write_row(const KdnRows& x, int64_t t, const double* from, const Task& w, float* room) {
  if (x.data == nullptr) return;
  for (int64_t i = 0; i < x.channels; ++i) room[i] = (float)from[i];
  store_row(x, w.at(x, t), room);
}
KDN_INLINE void write_one(const KdnRows& x, int64_t t, double value, const Task& w, float* room) {
  if (x.data == nullptr) return;
  room[0] = (float)value;
  store_row(x, w.at(x, t), room);
}

KDN_INLINE void write_matrix(float* to, const double* from, const Task& w) {
  for (int64_t i = 0; i < w.key; ++i)
    for (int64_t j = 0; j < w.key; ++j) to[i * w.key + j] = (float)from[i * w.width + j];
}
// to ← to + the symmetric part of `from` [K, K].
KDN_INLINE void add_symmetric(double* to, const float* from, const Task& w) {
  for (int64_t i = 0; i < w.key; ++i) {
    for (int64_t j = 0; j < i; ++j) {
      const double mean = ((double)from[i * w.key + j] + (double)from[j * w.key + i]) / 2;
      to[i * w.width + j] += mean;
      to[j * w.width + i] += mean;
    }
    to[i * w.width + i] += from[i * w.key + i];
  }
}
KDN_INLINE void start(double* p, const Task& w) {
  std::memset(p, 0, w.matrix() * sizeof(double));
  if (w.g.initial) {
    add_symmetric(p, w.g.initial + w.state(), w);
  } else {
    for (int64_t i = 0; i < w.key; ++i) p[i * w.width + i] = 1;
  }
}

// One token: its inputs, then what the filter makes of them.
struct Token {
  double *k = nullptr, *alpha = nullptr, *noise = nullptr, *h = nullptr;
  double* bare = nullptr;  // the diagonal of M
  double r = 0, z = 0, c = 0;
  static int64_t size(int64_t width) { return 5 * width; }

  Token() = default;
  Token(Room& room, int64_t n)
      : k(room.take(n)), alpha(room.take(n)), noise(room.take(n)), h(room.take(n)), bare(room.take(n)) {}
};

KDN_INLINE void read_token(Token& x, const Task& w, int64_t t, float* room) {
  read_row(x.k, w.g.k, t, w, room);
  read_row(x.noise, w.g.noise, t, w, room);
  load_row(room, w.g.obs, w.at(w.g.obs, t), 1);
  x.r = room[0];
  const KdnRows& d = w.g.decay;
  if (d.data == nullptr || d.channels == 1) {
    if (d.data) load_row(room, d, w.at(d, t), 1);
    const double alpha = d.data ? std::exp((double)room[0]) : 1;
    for (int64_t i = 0; i < w.key; ++i) x.alpha[i] = alpha;
  } else {
    load_row(room, d, w.at(d, t), w.width);
    for (int64_t i = 0; i < w.key; ++i) x.alpha[i] = std::exp((double)room[i]);
  }
  for (int64_t i = w.key; i < w.width; ++i) x.alpha[i] = 1;
}

// Calls f(std::integral_constant<int, vectors>, first column) for blocks of N vectors and for what is left.
template <int N, typename F>
KDN_INLINE void columns(int64_t at, int64_t width, F&& f) {
  for (; at + N * D <= width; at += N * D) f(std::integral_constant<int, N>{}, at);
  if constexpr (N > 1) columns<N / 2>(at, width, f);
}

// to = (α αᵀ) ⊙ (from − u uᵀ), h = to · k. `to` may be `from`.
inline void decay_matrix(double* to, const double* from, const double* u, const Token& x, const Task& w) {
  // Three vectors per column block stay in registers, of which there are 32 or 16.
  columns<(L == 16 ? 8 : 4)>(0, w.width, [&](auto n, int64_t at) {
    constexpr int N = n;
    Vec2 h[N] = {}, alpha[N], last[N];
    KDN_UNROLL
    for (int j = 0; j < N; ++j) {
      alpha[j] = load(x.alpha + at + j * D);
      last[j] = load(u + at + j * D);
    }
    for (int64_t i = 0; i < w.key; ++i) {
      const Vec2 alpha_i = splat(x.alpha[i]), last_i = splat(u[i]), k_i = splat(x.k[i]);
      KDN_UNROLL
      for (int j = 0; j < N; ++j) {
        const int64_t here = i * w.width + at + j * D;
        const Vec2 p = (alpha_i * alpha[j]) * (load(from + here) - last_i * last[j]);
        store(to + here, p);
        h[j] += k_i * p;
      }
    }
    KDN_UNROLL
    for (int j = 0; j < N; ++j) store(x.h + at + j * D, h[j]);
  });
}

// P̂ and the token's gain: adds ω to the diagonal of M = `p`, and finishes h, z, c. u ← √c h.
KDN_INLINE void observe(Token& x, double* p, double* u, double mu, const Task& w) {
  for (int64_t i = 0; i < w.key; ++i) {
    double& variance = p[i * w.width + i];
    x.bare[i] = variance;
    variance += x.noise[i];
  }
  for (int64_t i = 0; i < w.width; i += D)
    store(x.h + i, load(x.h + i) + load(x.noise + i) * load(x.k + i));
  x.z = dot(x.h, x.k, w.width);
  if (!(x.z > 0)) std::memset(x.h, 0, w.width * sizeof(double));
  if (x.z < 0) x.z = 0;  // NaN stays NaN
  x.c = mu / (x.r + mu * x.z);
  const Vec2 root = splat(std::sqrt(x.c));
  for (int64_t i = 0; i < w.width; i += D) store(u + i, root * load(x.h + i));
}

// P = P̂ − u uᵀ in place, and u is spent.
inline void finish(double* p, double* u, const Task& w) {
  for (int64_t i = 0; i < w.key; ++i) {
    const Vec2 u_i = splat(u[i]);
    for (int64_t j = 0; j < w.width; j += D) {
      double* here = p + i * w.width + j;
      store(here, load(here) - u_i * load(u + j));
    }
  }
  std::memset(u, 0, w.width * sizeof(double));
}

// d ← ∂P₋ from ∂P, given M and half = x/2. to_k = M x/2, to_decay = (D ⊙ M) 1, and e = ∂P₋ h_before for the
// token before.
inline void decay_gradient(double* d, const double* m, const double* half, const double* h_before,
                           const Token& x, double* to_k, double* to_decay, double* e, const Task& w) {
  columns<(L == 16 ? 4 : 2)>(0, w.width, [&](auto n, int64_t at) {
    constexpr int N = n;
    Vec2 k_sum[N] = {}, decay_sum[N] = {}, e_sum[N] = {}, alpha[N], k[N], part[N];
    KDN_UNROLL
    for (int j = 0; j < N; ++j) {
      alpha[j] = load(x.alpha + at + j * D);
      k[j] = load(x.k + at + j * D);
      part[j] = load(half + at + j * D);
    }
    for (int64_t i = 0; i < w.key; ++i) {
      const Vec2 alpha_i = splat(x.alpha[i]), k_i = splat(x.k[i]), part_i = splat(half[i]),
                 h_i = splat(h_before[i]);
      KDN_UNROLL
      for (int j = 0; j < N; ++j) {
        const int64_t here = i * w.width + at + j * D;
        const Vec2 bare = load(m + here);
        const Vec2 after = load(d + here) + part_i * k[j] + k_i * part[j];
        k_sum[j] += part_i * bare;
        decay_sum[j] += after * bare;
        const Vec2 before = (alpha_i * alpha[j]) * after;
        store(d + here, before);
        e_sum[j] += h_i * before;
      }
    }
    KDN_UNROLL
    for (int j = 0; j < N; ++j) {
      store(to_k + at + j * D, k_sum[j]);
      store(to_decay + at + j * D, decay_sum[j]);
      store(e + at + j * D, e_sum[j]);
    }
  });
}

// e = d h.
inline void multiply(double* e, const double* d, const double* h, const Task& w) {
  std::memset(e, 0, w.width * sizeof(double));
  for (int64_t i = 0; i < w.key; ++i) {
    const Vec2 h_i = splat(h[i]);
    for (int64_t j = 0; j < w.width; j += D)
      store(e + j, load(e + j) + h_i * load(d + i * w.width + j));
  }
}

// ∂P of one sequence and head, and the rows that carry it from token to token.
struct Gradient {
  double *d, *e, *d_gain, *half, *row, *to_k;
  double d_mu = 0;
  static int64_t size(const Task& w) { return w.matrix() + 5 * w.width; }

  Gradient(Room& room, const Task& w)
      : d(room.take(w.matrix())), e(room.take(w.width)), d_gain(room.take(w.width)), half(room.take(w.width)),
        row(room.take(w.width)), to_k(room.take(w.width)) {}

  // One token back: m holds its P̂ and is made its M; h_before belongs to the token before it.
  void step(const Token& x, double* m, const double* h_before, double mu, int64_t t, const Task& w,
            float* room) {
    const KdnGain& g = w.g;
    const int64_t n = w.width;
    std::memset(d_gain, 0, n * sizeof(double));
    if (g.d_gain.data) read_row(d_gain, g.d_gain, t, w, room);
    const double gamma = x.r + x.z, slope = 1 / ((x.r + mu * x.z) * (x.r + mu * x.z));
    const double d_c = -dot(x.h, e, n), d_gamma = -dot(d_gain, x.h, n) / (gamma * gamma);
    const double d_z = d_gamma - d_c * x.c * x.c;
    write_one(g.d_obs, t, d_gamma - d_c * mu * slope, w, room);
    d_mu += d_c * x.r * slope;
    for (int64_t i = 0; i < n; ++i)
      half[i] = x.z > 0 ? (d_gain[i] / gamma - 2 * x.c * e[i] + d_z * x.k[i]) / 2 : 0;
    if (g.d_prior.data) add_symmetric(d, (const float*)g.d_prior.data + w.at(g.d_prior, t), w);
    for (int64_t i = 0; i < w.key; ++i) {
      row[i] = d[i * n + i] + 2 * half[i] * x.k[i];
      m[i * n + i] = x.bare[i];
    }
    write_row(g.d_noise, t, row, w, room);
    decay_gradient(d, m, half, h_before, x, to_k, row, e, w);
    double d_decay = 0;
    for (int64_t i = 0; i < w.key; ++i) {
      row[i] *= 2;
      d_decay += row[i];
    }
    if (g.d_decay.channels == 1) {
      write_one(g.d_decay, t, d_decay, w, room);
    } else {
      write_row(g.d_decay, t, row, w, room);
    }
    for (int64_t i = 0; i < w.key; ++i) row[i] = d_z * x.h[i] + 2 * (to_k[i] + x.noise[i] * half[i]);
    write_row(g.d_k, t, row, w, room);
  }
};

}  // namespace exact

inline void exact_forward(const KdnGain& g, int64_t task) {
  using namespace exact;
  const Task w(g, task);
  const int64_t n = w.width;
  const double mu = g.info_scale[w.head];
  Room room(w.matrix() + Token::size(n) + 3 * n);
  double *p = room.take(w.matrix()), *u = room.take(n), *gain = room.take(n);
  Token x(room, n);
  float* floats = (float*)room.take(n);
  start(p, w);
  std::memset(u, 0, n * sizeof(double));
  for (int64_t t = w.begin; t < w.end; ++t) {
    if (g.checkpoints && (t - w.begin) % EXACT_CHUNK == 0) {
      finish(p, u, w);
      double* kept = w.checkpoint((t - w.begin) / EXACT_CHUNK);
      for (int64_t i = 0; i < w.key; ++i) std::memcpy(kept + i * w.key, p + i * n, w.key * sizeof(double));
    }
    read_token(x, w, t, floats);
    decay_matrix(p, p, u, x, w);
    observe(x, p, u, mu, w);
    for (int64_t i = 0; i < n; ++i) gain[i] = x.h[i] / (x.r + x.z);
    write_row(g.gain, t, gain, w, floats);
    if (g.prior.data) write_matrix((float*)g.prior.data + w.at(g.prior, t), p, w);
  }
  finish(p, u, w);
  write_matrix(g.cov + w.state(), p, w);
}

inline void exact_backward(const KdnGain& g, int64_t task) {
  using namespace exact;
  const Task w(g, task);
  const int64_t n = w.width, matrix = w.matrix();
  const double mu = g.info_scale[w.head];
  Room room((EXACT_CHUNK + 1) * matrix + EXACT_CHUNK * Token::size(n) + Gradient::size(w) + 2 * n);
  double *entering = room.take(matrix), *priors = room.take(EXACT_CHUNK * matrix), *u = room.take(n);
  Gradient back(room, w);
  float* floats = (float*)room.take(n);
  Token tokens[EXACT_CHUNK];
  for (Token& x : tokens) x = Token(room, n);
  std::memset(back.d, 0, matrix * sizeof(double));
  if (g.d_cov) add_symmetric(back.d, g.d_cov + w.state(), w);
  std::memset(entering, 0, matrix * sizeof(double));
  for (int64_t chunk = (w.end - w.begin + EXACT_CHUNK - 1) / EXACT_CHUNK - 1; chunk >= 0; --chunk) {
    const int64_t first = w.begin + chunk * EXACT_CHUNK;
    const int64_t count = first + EXACT_CHUNK < w.end ? EXACT_CHUNK : w.end - first;
    const double* kept = w.checkpoint(chunk);
    for (int64_t i = 0; i < w.key; ++i)
      std::memcpy(entering + i * n, kept + i * w.key, w.key * sizeof(double));
    std::memset(u, 0, n * sizeof(double));
    for (int64_t i = 0; i < count; ++i) {
      double* p = priors + i * matrix;
      read_token(tokens[i], w, first + i, floats);
      decay_matrix(p, i ? p - matrix : entering, u, tokens[i], w);
      observe(tokens[i], p, u, mu, w);
    }
    multiply(back.e, back.d, tokens[count - 1].h, w);
    for (int64_t i = count - 1; i >= 0; --i) {
      // The chunk's first token sums an e that the chunk before, with its last h, replaces.
      const double* h_before = tokens[i ? i - 1 : 0].h;
      back.step(tokens[i], priors + i * matrix, h_before, mu, first + i, w, floats);
    }
  }
  if (g.d_info_scale) g.d_info_scale[task] = (float)back.d_mu;
  if (g.d_initial) write_matrix(g.d_initial + w.state(), back.d, w);
}

}  // namespace KDN_NAMESPACE
