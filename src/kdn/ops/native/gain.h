// The diagonal and isotropic gains, as the recurrences themselves, token by token.
//
// With α² per channel (diagonal) or its mean (isotropic), e = k² or ‖k‖² and u = μ e / r or μ e / (r K),
//
//     p̂ = α² p + ω      γ = r + Σ p̂ e      g = p̂ k / γ      p ← c p̂,  c = 1/(1 + u p̂)
//
// Backward, per chunk of GAIN_CHUNK tokens from the last to the first, p̂, p and c are recomputed from a
// checkpoint of p, small enough for the second-level cache. Then, with ∂p what reaches p from later tokens,
//
//     diagonal   ∂γ = −Σ ∂g p̂ k / γ²     ∂p̂ = ∂g k/γ + ∂γ e + c² ∂p
//     isotropic  ∂γ = −p̂ Σ ∂g k / γ²     ∂p̂ = r Σ ∂g k / γ² + c² ∂p
//     ∂u = −c² p̂² ∂p      ∂e = ∂u μ/r + ∂γ p̂      ∂k = ∂g p̂/γ + 2 k ∂e      ∂ω = ∂p̂
//     ∂r = ∂γ − Σ ∂u u/r      ∂μ = Σ ∂u e/r      ∂log α = 2 α² p ∂p̂      ∂p ← α² ∂p̂
//
// (μ/K for μ in isotropic's ∂e, ∂r, ∂μ.) The isotropic ∂p̂ is the diagonal sum with (γ − p̂ e)/γ² = r/γ²
// put in: for a long key that difference would have no digits left. ∂log α takes the p of the token before,
// not p̂ − ω, for the same reason.
//
// Padding has k = 0, ω = 0, p = 0 and ∂p = 0, and so stays.
#pragma once
#include "heads.h"
#include "simd.h"
#include "threads.h"

namespace KDN_NAMESPACE {

constexpr int64_t GAIN_CHUNK = 64;  // tokens between checkpoints
constexpr int64_t AHEAD = 10;       // tokens between asking for a row and using it

// Everything a task needs to know about its sequence and head.
struct Place {
  const KdnGain& g;
  int64_t batch, begin, end, head, sequence;
  int64_t width;  // K rounded up to vectors

  Place(const KdnGain& g, int64_t task)
      : g(g), head(task % g.heads), sequence(task / g.heads), width(round_up(g.key, L)) {
    const KdnSequences& s = g.sequences;
    batch = s.offsets ? 0 : sequence;
    begin = s.offsets ? s.offsets[sequence] : 0;
    end = s.offsets ? s.offsets[sequence + 1] : s.length;
  }
  // A later head of the same sequence.
  Place(const Place& first, int64_t later) : Place(first) { head += later; }
  int64_t row(const KdnRows& x, int64_t t) const { return offset(x, batch, t, head); }
  int64_t cov() const { return sequence * g.heads + head; }
  int64_t checkpoint(int64_t chunk) const { return (g.first_chunk[sequence] + chunk) * g.heads + head; }
};

// --- rows: used where they lie if they are whole vectors of float32, else through `room` ---

KDN_INLINE bool whole(const KdnRows& x, int64_t padded) {
  return x.type == KDN_FLOAT32 && x.channels == padded;
}
// Zeros if the argument was not given.
KDN_INLINE const float* see_row(float* room, const KdnRows& x, const Place& w, int64_t t, int64_t padded) {
  if (x.data == nullptr) {
    std::memset(room, 0, padded * 4);
    return room;
  }
  if (whole(x, padded)) return (const float*)x.data + w.row(x, t);
  load_row(room, x, w.row(x, t), padded);
  return room;
}
KDN_INLINE float* open_row(float* room, const KdnRows& x, const Place& w, int64_t t, int64_t padded) {
  return x.data && whole(x, padded) ? (float*)x.data + w.row(x, t) : room;
}
KDN_INLINE void close_row(const float* row, const KdnRows& x, const Place& w, int64_t t, int64_t padded) {
  if (x.data && !whole(x, padded)) store_row(x, w.row(x, t), row);
}
KDN_INLINE float load_one(const KdnRows& x, const Place& w, int64_t t) {
  if (x.data == nullptr) return 0;
  float one[L];
  load_row(one, x, w.row(x, t), 1);
  return one[0];
}
KDN_INLINE void store_one(const KdnRows& x, const Place& w, int64_t t, float value) {
  if (x.data == nullptr) return;
  float one[L] = {value};
  store_row(x, w.row(x, t), one);
}
KDN_INLINE int64_t chunk_count(const Place& w) { return (w.end - w.begin + GAIN_CHUNK - 1) / GAIN_CHUNK; }
KDN_INLINE void fill(float* to, float value, int64_t n, int64_t padded) {
  for (int64_t i = 0; i < padded; ++i) to[i] = i < n ? value : 0;
}

// Asks for a row that will be needed. A head's rows lie pages apart, where the hardware does not look ahead
// by itself..
KDN_INLINE void fetch_row(const KdnRows& x, const Place& w, int64_t t) {
  if (x.data == nullptr) return;
  const int64_t size = x.type == KDN_FLOAT32 ? 4 : 2;
  const char* row = (const char*)x.data + w.row(x, t) * size;
  for (int64_t i = 0; i < x.channels * size; i += 64) prefetch(row + i);
}
KDN_INLINE void fetch_inputs(const Place& w, int64_t t) {
  fetch_row(w.g.k, w, t);
  fetch_row(w.g.decay, w, t);
  fetch_row(w.g.noise, w, t);
  fetch_row(w.g.obs, w, t);
}
KDN_INLINE void fetch_forward(const Place& w, int64_t t) {
  if (t >= w.end) return;
  fetch_inputs(w, t);
  fetch_row(w.g.gain, w, t);
  fetch_row(w.g.prior, w, t);
}
// Step `step` of the backward pass over the chunk of `count` tokens from `first`: first through its inputs,
// then back through its gradients, then on into the inputs of the turn after it.
KDN_INLINE void fetch_backward(const Place& w, int64_t first, int64_t count, int64_t step, const Place& next,
                               int64_t next_first) {
  if (step < count) {
    fetch_inputs(w, first + step);
  } else if (step < 2 * count) {
    const int64_t t = first + 2 * count - 1 - step;
    fetch_row(w.g.d_gain, w, t);
    fetch_row(w.g.d_prior, w, t);
    fetch_row(w.g.d_k, w, t);
    fetch_row(w.g.d_decay, w, t);
    fetch_row(w.g.d_noise, w, t);
    fetch_row(w.g.d_obs, w, t);
  } else if (next_first >= w.begin && next_first + step - 2 * count < w.end) {
    fetch_inputs(next, next_first + step - 2 * count);
  }
}

// α² of one token, K wide; 0 or 1 in the padding.
KDN_INLINE void load_decay(float* to, const Place& w, int64_t t) {
  const KdnRows& d = w.g.decay;
  if (d.data == nullptr || d.channels == 1) {
    const Vec a = d.data ? exp(splat(2 * load_one(d, w, t))) : splat(1.f);
    for (int64_t i = 0; i < w.width; i += L) store(to + i, a);
  } else {
    const float* log = see_row(to, d, w, t, w.width);
    for (int64_t i = 0; i < w.width; i += L) {
      const Vec x = load(log + i);
      store(to + i, exp(x + x));
    }
  }
}

// --- diagonal ---

// One token: p̂ and c of every channel from p, all `width` long; returns Σ p̂ e.
KDN_INLINE float diagonal_step(float* prior, float* shrink, float* after, const float* before, const float* k,
                               const float* alpha2, const float* noise, float evidence, int64_t width) {
  const Vec one = splat(1.f), scale = splat(evidence);
  Vec z = {};
  for (int64_t i = 0; i < width; i += L) {
    const Vec key = load(k + i), e = key * key;
    const Vec h = load(alpha2 + i) * load(before + i) + load(noise + i);
    const Vec c = one / (one + scale * e * h);
    z += h * e;
    store(prior + i, h);
    store(shrink + i, c);
    store(after + i, h * c);
  }
  return sum(z);
}

inline void diagonal_forward(const KdnGain& g, Heads heads) {
  const Place any(g, heads.first);
  const int64_t n = any.width;
  float* room = kdn::scratch(6 * n + heads.count * n);
  float *alpha2 = room, *shrink = room + n, *prior_room = room + 2 * n, *k_room = room + 3 * n,
        *noise_room = room + 4 * n, *gain_room = room + 5 * n, *covs = room + 6 * n;
  for (int64_t h = 0; h < heads.count; ++h) {
    const Place w(any, h);
    fill(covs + h * n, 1, g.key, n);
    if (g.initial) std::memcpy(covs + h * n, g.initial + w.cov() * g.key, g.key * 4);
    for (int64_t t = w.begin; t < w.begin + AHEAD; ++t) fetch_forward(w, t);
  }
  for (int64_t t = any.begin; t < any.end; ++t)
    for (int64_t h = 0; h < heads.count; ++h) {
      const Place w(any, h);
      float* p = covs + h * n;
      fetch_forward(w, t + AHEAD);
      if (g.checkpoints && (t - w.begin) % GAIN_CHUNK == 0)
        std::memcpy(g.checkpoints + w.checkpoint((t - w.begin) / GAIN_CHUNK) * g.key, p, g.key * 4);
      load_decay(alpha2, w, t);
      const float* k = see_row(k_room, g.k, w, t, n);
      const float* noise = see_row(noise_room, g.noise, w, t, n);
      const float r = load_one(g.obs, w, t);
      float* prior = open_row(prior_room, g.prior, w, t, n);
      const float z = diagonal_step(prior, shrink, p, p, k, alpha2, noise, g.info_scale[w.head] / r, n);
      const Vec inverse = splat(1 / (r + z));
      float* gain = open_row(gain_room, g.gain, w, t, n);
      for (int64_t i = 0; i < n; i += L) store(gain + i, load(prior + i) * inverse * load(k + i));
      close_row(gain, g.gain, w, t, n);
      close_row(prior, g.prior, w, t, n);
    }
  for (int64_t h = 0; h < heads.count; ++h)
    std::memcpy(g.cov + Place(any, h).cov() * g.key, covs + h * n, g.key * 4);
}

inline void diagonal_backward(const KdnGain& g, Heads heads) {
  const Place any(g, heads.first);
  const int64_t n = any.width, block = GAIN_CHUNK * n;
  float* keys = kdn::scratch(5 * block + (6 + heads.count) * n);
  float *alpha2s = keys + block, *priors = keys + 2 * block, *shrinks = keys + 3 * block,
        *before = keys + 4 * block;  // GAIN_CHUNK + 1 rows
  float* row = before + block + n;
  float *d_gain_room = row + n, *d_k_room = row + 2 * n, *d_decay_room = row + 3 * n,
        *d_noise_room = row + 4 * n, *d_covs = row + 5 * n;
  float obs[GAIN_CHUNK], inverse[GAIN_CHUNK];
  double d_mus[MOST_HEADS] = {};
  fill(d_covs, 0, 0, heads.count * n);
  for (int64_t h = 0; h < heads.count && g.d_cov; ++h)
    std::memcpy(d_covs + h * n, g.d_cov + Place(any, h).cov() * g.key, g.key * 4);

  for (Turn now{0, chunk_count(any) - 1}; now.tile >= 0; now = next_turn(now, heads, -1)) {
    const Turn after = next_turn(now, heads, -1);
    const Place w(any, now.head), next(any, after.head);
    const int64_t chunk = now.tile, next_first = any.begin + after.tile * GAIN_CHUNK;
    const float mu = g.info_scale[w.head];
    float* d_p = d_covs + now.head * n;
    const int64_t first = w.begin + chunk * GAIN_CHUNK;
    const int64_t count = first + GAIN_CHUNK < w.end ? GAIN_CHUNK : w.end - first;
    fill(before, 0, 0, n);
    std::memcpy(before, g.checkpoints + w.checkpoint(chunk) * g.key, g.key * 4);
    for (int64_t j = 0; j < count; ++j) {
      fetch_backward(w, first, count, j + AHEAD, next, next_first);
      load_decay(alpha2s + j * n, w, first + j);
      load_row(keys + j * n, g.k, w.row(g.k, first + j), n);
      const float* noise = see_row(row, g.noise, w, first + j, n);
      obs[j] = load_one(g.obs, w, first + j);
      const float z = diagonal_step(priors + j * n, shrinks + j * n, before + (j + 1) * n, before + j * n,
                                    keys + j * n, alpha2s + j * n, noise, mu / obs[j], n);
      inverse[j] = 1 / (obs[j] + z);
    }
    for (int64_t j = count - 1; j >= 0; --j) {
      const int64_t t = first + j;
      fetch_backward(w, first, count, 2 * count - 1 - j + AHEAD, next, next_first);
      const float *k = keys + j * n, *alpha2 = alpha2s + j * n, *prior = priors + j * n,
                  *shrink = shrinks + j * n, *p = before + j * n;
      const float* d_gain = see_row(d_gain_room, g.d_gain, w, t, n);
      const float* d_prior = g.d_prior.data ? see_row(row, g.d_prior, w, t, n) : nullptr;
      float* d_k = open_row(d_k_room, g.d_k, w, t, n);
      float* d_noise = open_row(d_noise_room, g.d_noise, w, t, n);
      float* d_decay = g.decay.channels == g.key ? open_row(d_decay_room, g.d_decay, w, t, n) : d_decay_room;
      Vec d_z = {};
      for (int64_t i = 0; i < n; i += L) d_z += load(d_gain + i) * load(k + i) * load(prior + i);
      const float d_gamma = -sum(d_z) * inverse[j] * inverse[j];
      const Vec per_gamma = splat(inverse[j]), d_g = splat(d_gamma), evidence = splat(mu / obs[j]);
      Vec d_evidence = {}, d_decays = {};
      for (int64_t i = 0; i < n; i += L) {
        const Vec key = load(k + i), h = load(prior + i), c = load(shrink + i), a = load(alpha2 + i);
        const Vec dg = load(d_gain + i) * per_gamma, e = key * key;
        const Vec later = c * c * load(d_p + i);
        Vec d_h = dg * key + d_g * e + later;
        if (d_prior) d_h += load(d_prior + i);
        const Vec d_u = -later * h * h;
        const Vec d_e = d_u * evidence + d_g * h;
        const Vec back = a * d_h, d_log = load(p + i) * (back + back);
        d_evidence += d_u * e;
        d_decays += d_log;
        store(d_k + i, dg * h + (d_e + d_e) * key);
        store(d_noise + i, d_h);
        store(d_decay + i, d_log);
        store(d_p + i, back);
      }
      const float d_ratio = sum(d_evidence) / obs[j];  // ∂(μ/r) / r
      d_mus[now.head] += d_ratio;
      store_one(g.d_obs, w, t, d_gamma - d_ratio * (mu / obs[j]));
      close_row(d_k, g.d_k, w, t, n);
      close_row(d_noise, g.d_noise, w, t, n);
      if (g.d_decay.data && g.decay.channels == 1)
        store_one(g.d_decay, w, t, sum(d_decays));
      else
        close_row(d_decay, g.d_decay, w, t, n);
    }
  }
  for (int64_t h = 0; h < heads.count; ++h) {
    const int64_t at = Place(any, h).cov();
    g.d_info_scale[at] = (float)d_mus[h];
    if (g.d_initial) std::memcpy(g.d_initial + at * g.key, d_covs + h * n, g.key * 4);
  }
}

// --- isotropic ---

// Σ x y over the K channels.
KDN_INLINE float dot(const float* x, const float* y, int64_t width) {
  Vec z = {};
  for (int64_t i = 0; i < width; i += L) z += load(x + i) * load(y + i);
  return sum(z);
}

// The mean of α², whose channels are left in `to` if there is more than one.
KDN_INLINE float mean_decay(float* to, const Place& w, int64_t t) {
  const KdnRows& d = w.g.decay;
  if (d.data == nullptr) return 1;
  if (d.channels == 1) return exp(splat(2 * load_one(d, w, t)))[0];
  load_decay(to, w, t);
  for (int64_t i = w.g.key; i < w.width; ++i) to[i] = 0;
  Vec z = {};
  for (int64_t i = 0; i < w.width; i += L) z += load(to + i);
  return sum(z) / (float)w.g.key;
}

inline void isotropic_forward(const KdnGain& g, Heads heads) {
  const Place any(g, heads.first);
  const int64_t n = any.width;
  float* alpha2 = kdn::scratch(3 * n);
  float *k_room = alpha2 + n, *gain_room = alpha2 + 2 * n;
  float covs[MOST_HEADS];
  for (int64_t h = 0; h < heads.count; ++h) {
    const Place w(any, h);
    covs[h] = g.initial ? g.initial[w.cov()] : 1;
    for (int64_t t = w.begin; t < w.begin + AHEAD; ++t) fetch_forward(w, t);
  }
  for (int64_t t = any.begin; t < any.end; ++t)
    for (int64_t h = 0; h < heads.count; ++h) {
      const Place w(any, h);
      fetch_forward(w, t + AHEAD);
      if (g.checkpoints && (t - w.begin) % GAIN_CHUNK == 0)
        g.checkpoints[w.checkpoint((t - w.begin) / GAIN_CHUNK)] = covs[h];
      const float* k = see_row(k_room, g.k, w, t, n);
      const float e = dot(k, k, n), r = load_one(g.obs, w, t);
      const float prior = mean_decay(alpha2, w, t) * covs[h] + load_one(g.noise, w, t);
      covs[h] = prior / (1 + g.info_scale[w.head] / (float)g.key / r * e * prior);
      const Vec scale = splat(prior / (r + prior * e));
      float* gain = open_row(gain_room, g.gain, w, t, n);
      for (int64_t i = 0; i < n; i += L) store(gain + i, load(k + i) * scale);
      close_row(gain, g.gain, w, t, n);
      store_one(g.prior, w, t, prior);
    }
  for (int64_t h = 0; h < heads.count; ++h) g.cov[Place(any, h).cov()] = covs[h];
}

inline void isotropic_backward(const KdnGain& g, Heads heads) {
  const Place any(g, heads.first);
  const int64_t n = any.width, block = GAIN_CHUNK * n;
  float* keys = kdn::scratch(2 * block + 3 * n);
  float* alpha2s = keys + block;
  float *d_gain_room = keys + 2 * block, *d_k_room = d_gain_room + n, *d_decay_room = d_gain_room + 2 * n;
  float obs[GAIN_CHUNK], es[GAIN_CHUNK], means[GAIN_CHUNK], priors[GAIN_CHUNK], before[GAIN_CHUNK];
  double d_mus[MOST_HEADS] = {};
  float d_covs[MOST_HEADS] = {};
  for (int64_t h = 0; h < heads.count && g.d_cov; ++h) d_covs[h] = g.d_cov[Place(any, h).cov()];

  for (Turn now{0, chunk_count(any) - 1}; now.tile >= 0; now = next_turn(now, heads, -1)) {
    const Turn after = next_turn(now, heads, -1);
    const Place w(any, now.head), next(any, after.head);
    const int64_t chunk = now.tile, next_first = any.begin + after.tile * GAIN_CHUNK;
    const float mu = g.info_scale[w.head] / (float)g.key;
    float& d_p = d_covs[now.head];
    const int64_t first = w.begin + chunk * GAIN_CHUNK;
    const int64_t count = first + GAIN_CHUNK < w.end ? GAIN_CHUNK : w.end - first;
    float p = g.checkpoints[w.checkpoint(chunk)];
    for (int64_t j = 0; j < count; ++j) {
      fetch_backward(w, first, count, j + AHEAD, next, next_first);
      load_row(keys + j * n, g.k, w.row(g.k, first + j), n);
      es[j] = dot(keys + j * n, keys + j * n, n);
      obs[j] = load_one(g.obs, w, first + j);
      means[j] = mean_decay(alpha2s + j * n, w, first + j);
      before[j] = p;
      priors[j] = means[j] * p + load_one(g.noise, w, first + j);
      p = priors[j] / (1 + mu / obs[j] * es[j] * priors[j]);
    }
    for (int64_t j = count - 1; j >= 0; --j) {
      const int64_t t = first + j;
      fetch_backward(w, first, count, 2 * count - 1 - j + AHEAD, next, next_first);
      const float *k = keys + j * n, *d_gain = see_row(d_gain_room, g.d_gain, w, t, n);
      const float r = obs[j], e = es[j], prior = priors[j], evidence = mu / r;
      const float inverse = 1 / (r + prior * e), shrink = 1 / (1 + evidence * e * prior);
      const float along = dot(d_gain, k, n) * inverse * inverse;
      const float d_gamma = -along * prior, later = shrink * shrink * d_p;
      const float d_prior = along * r + later + load_one(g.d_prior, w, t);
      const float d_u = -later * prior * prior, d_e = d_u * evidence + d_gamma * prior;
      const float d_ratio = d_u * e / r;
      const float d_log = 2 * before[j] * d_prior;  // ∂log α / α²
      d_p = means[j] * d_prior;
      d_mus[now.head] += d_ratio;
      store_one(g.d_noise, w, t, d_prior);
      store_one(g.d_obs, w, t, d_gamma - d_ratio * evidence);
      const Vec of_gain = splat(prior * inverse), of_key = splat(2 * d_e);
      float* d_k = open_row(d_k_room, g.d_k, w, t, n);
      for (int64_t i = 0; i < n; i += L) store(d_k + i, load(d_gain + i) * of_gain + load(k + i) * of_key);
      close_row(d_k, g.d_k, w, t, n);
      if (g.d_decay.data && g.decay.channels == 1) {
        store_one(g.d_decay, w, t, d_log * means[j]);
      } else if (g.d_decay.data) {
        const Vec share = splat(d_log / (float)g.key);
        float* d_decay = open_row(d_decay_room, g.d_decay, w, t, n);
        for (int64_t i = 0; i < n; i += L) store(d_decay + i, load(alpha2s + j * n + i) * share);
        close_row(d_decay, g.d_decay, w, t, n);
      }
    }
  }
  for (int64_t h = 0; h < heads.count; ++h) {
    const int64_t at = Place(any, h).cov();
    g.d_info_scale[at] = (float)(d_mus[h] / (double)g.key);
    if (g.d_initial) g.d_initial[at] = d_covs[h];
  }
}

}  // namespace KDN_NAMESPACE
