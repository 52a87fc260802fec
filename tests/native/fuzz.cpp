// Calls every CPU kernel on random sizes, strides, types and options, for the sanitizers to watch:
//
//     make sanitize
//
// Each tensor is an allocation of its own that ends with its last element, so a read or a write beyond one is
// found, and starts at any multiple of its element's size, so an assumed alignment is found. That results are
// right is for the Python tests; here they must be finite, and the same bits for 1 and for 3 threads.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "kdn.h"

namespace {

std::mt19937_64 generator;

int64_t whole(int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(generator);
}
bool heads_up(double p = 0.5) { return std::bernoulli_distribution(p)(generator); }
float between(float low, float high) { return std::uniform_real_distribution<float>(low, high)(generator); }

// Bytes of exactly the wanted size, so that the sanitizer's guards lie right around them.
struct Block {
  explicit Block(size_t bytes) : data(std::malloc(bytes ? bytes : 1)), size(bytes) {}
  ~Block() { std::free(data); }
  void* data;
  size_t size;
};

struct Arena {
  std::vector<std::unique_ptr<Block>> blocks;
  std::vector<Block*> results;  // those whose bytes are compared

  Block& take(size_t bytes) {
    blocks.push_back(std::make_unique<Block>(bytes));
    return *blocks.back();
  }
  float* floats(int64_t count, float low, float high) {
    float* to = (float*)take(count * 4).data;
    for (int64_t i = 0; i < count; ++i) to[i] = between(low, high);
    return to;
  }
  template <typename T>
  T* result(int64_t count) {
    Block& block = take(count * sizeof(T));
    std::memset(block.data, 0, block.size);
    results.push_back(&block);
    return (T*)block.data;
  }
};

struct Sizes {
  int64_t batch, time, heads;
};

uint16_t half(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return (uint16_t)(bits >> 16);
}

// A tensor [batch, time, heads, channels] with its first three axes in any order and gaps between them.
KdnRows rows(Arena& arena, const Sizes& s, int64_t channels, KdnType type, float low, float high, bool result) {
  const int64_t extents[3] = {s.batch, s.time, s.heads};
  int order[3] = {0, 1, 2};
  std::shuffle(order, order + 3, generator);
  int64_t strides[3], next = channels + (heads_up() ? whole(0, 5) : 0), last = channels;
  for (int axis : order) {
    strides[axis] = next;
    last += (extents[axis] - 1) * next;
    next = next * extents[axis] + (heads_up(0.3) ? whole(0, 7) : 0);
  }
  const int64_t size = type == KDN_FLOAT32 ? 4 : 2, before = whole(0, 3);
  Block& block = arena.take((before + last) * size);
  std::memset(block.data, 0, block.size);
  char* data = (char*)block.data + before * size;
  if (result)
    arena.results.push_back(&block);
  else
    for (int64_t i = 0; i < last; ++i) {
      const float x = between(low, high);
      const uint16_t rounded = half(x);
      std::memcpy(data + i * size, type == KDN_FLOAT32 ? (const void*)&x : &rounded, size);
    }
  return {data, strides[0], strides[1], strides[2], type, (int32_t)channels};
}

// A case is built twice from one seed, so that both runs find the same inputs in fresh allocations.
struct Case {
  Arena arena;
  KdnMemory memory{};
  KdnGain gain[3]{};
  KdnDecode decode{};
  KdnConv conv{};
  KdnDecay decays{};
  KdnReadOut read_out{};
  KdnSwiGLU swiglu{};
  KdnLoss loss{};
  KdnRows weight{}, row{}, bias{}, product{};

  KdnType type() { return heads_up() ? KDN_FLOAT32 : KDN_BFLOAT16; }

  explicit Case(uint64_t seed) {
    generator.seed(seed);
    const bool packed = heads_up(0.4);
    const int64_t heads = whole(1, 4), count = whole(1, 3), key = whole(1, heads_up(0.2) ? 130 : 40);
    const int64_t value = whole(1, heads_up(0.3) ? 200 : 40);
    int64_t total = 0, longest = whole(1, heads_up(0.2) ? 700 : 140);
    KdnSequences sequences{nullptr, count, longest};
    if (packed) {
      int64_t* offsets = (int64_t*)arena.take((count + 1) * 8).data;
      offsets[0] = 0;
      for (int64_t i = 0; i < count; ++i) offsets[i + 1] = offsets[i] + (i ? whole(0, longest) : longest);
      total = offsets[count];
      sequences = {offsets, count, 0};
    } else {
      total = longest;
    }
    const Sizes s{packed ? 1 : count, total, heads};
    const int64_t decay = whole(0, 2);  // none, per head, per channel
    auto input = [&](int64_t channels, float low, float high) {
      return rows(arena, s, channels, type(), low, high, false);
    };
    auto result = [&](const KdnRows& like) {
      return rows(arena, s, like.channels, (KdnType)like.type, 0, 0, true);
    };
    auto chunks = [&](int64_t every, int64_t& rows_needed) {
      int64_t* first = (int64_t*)arena.take(count * 8).data;
      rows_needed = 0;
      for (int64_t i = 0; i < count; ++i) {
        first[i] = rows_needed;
        const int64_t length = packed ? sequences.offsets[i + 1] - sequences.offsets[i] : longest;
        rows_needed += (length + every - 1) / every;
      }
      return first;
    };
    const float strongest = heads_up(0.2) ? -60.f : -0.5f;
    const KdnRows log_decay = decay == 0 ? KdnRows{} : input(decay == 1 ? 1 : key, strongest, 0);

    int64_t kept;
    memory.sequences = sequences;
    memory.heads = heads, memory.key = key, memory.value = value;
    memory.q = input(key, -1, 1);
    const float unit = 1 / std::sqrt((float)key);
    if (heads_up(0.8)) memory.k = input(key, -unit, unit);
    memory.v = input(value, -1, 1), memory.gain = input(key, -unit, unit);
    memory.decay = log_decay;
    memory.scale = unit;
    memory.out = result(memory.v);
    const int64_t states = count * heads * key * value;
    if (heads_up()) memory.initial = arena.floats(states, -1, 1);
    memory.state = arena.result<float>(states);
    memory.first_chunk = chunks(KDN_CHUNK, kept);
    memory.checkpoints = arena.result<float>(kept * heads * key * value);
    if (heads_up(0.8)) memory.d_out = input(value, -1, 1);
    if (heads_up()) memory.d_state = arena.floats(states, -1, 1);
    memory.d_q = result(memory.q), memory.d_v = result(memory.v), memory.d_gain = result(memory.gain);
    if (memory.k.data) memory.d_k = result(memory.k);
    if (log_decay.data) memory.d_decay = result(log_decay);
    if (memory.initial) memory.d_initial = arena.result<float>(states);

    for (int kind = 0; kind < 3; ++kind) {
      KdnGain& g = gain[kind];
      const int64_t width = kind == 0 ? key : kind == 1 ? 1 : key * key, covs = count * heads * width;
      g.sequences = sequences;
      g.heads = heads, g.key = key;
      g.k = input(key, -unit, unit);
      g.decay = log_decay;
      g.noise = input(kind == 1 ? 1 : key, 0, 1), g.obs = input(1, 0.01f, 1);
      g.info_scale = arena.floats(heads, 0.5f, 2.f * key);
      g.gain = result(g.k);
      if (heads_up()) g.prior = rows(arena, s, width, KDN_FLOAT32, 0, 0, true);
      if (heads_up()) {
        float* p = arena.floats(covs, 0.1f, 2);
        if (kind == 2)  // a covariance: diagonal will do
          for (int64_t i = 0; i < covs; ++i)
            if (i % (key * key) / key != i % key) p[i] = 0;
        g.initial = p;
      }
      g.cov = arena.result<float>(covs);
      g.first_chunk = chunks(kind == 2 ? KDN_EXACT_CHUNK : KDN_CHUNK, kept);
      g.checkpoints = kind == 2 ? (float*)arena.result<double>(kept * heads * width)
                                : arena.result<float>(kept * heads * width);
      if (heads_up(0.8)) g.d_gain = input(key, -1, 1);
      if (heads_up()) g.d_prior = rows(arena, s, width, KDN_FLOAT32, -1, 1, false);
      if (heads_up()) g.d_cov = arena.floats(covs, -1, 1);
      g.d_k = result(g.k), g.d_noise = result(g.noise), g.d_obs = result(g.obs);
      if (log_decay.data) g.d_decay = result(log_decay);
      g.d_info_scale = arena.result<float>(count * heads);
      if (g.initial) g.d_initial = arena.result<float>(covs);
    }

    conv.sequences = sequences;
    conv.heads = heads, conv.key = key, conv.width = whole(1, 6);
    conv.x = input(key, -2, 2);
    conv.weight = arena.floats(conv.width * heads * key, -1, 1);
    const int64_t inputs = count * (conv.width - 1) * heads * key;
    if (heads_up()) conv.history = arena.floats(inputs, -2, 2);
    conv.activation = heads_up(), conv.unit = heads_up(), conv.eps = 1e-6f;
    conv.y = result(conv.x), conv.d_x = result(conv.x);
    conv.d_y = input(key, -1, 1);
    conv.d_weight = arena.result<float>(count * conv.width * heads * key);
    if (conv.history) conv.d_history = arena.result<float>(inputs);

    decays.batch = read_out.batch = s.batch, decays.time = read_out.time = s.time;
    decays.heads = read_out.heads = heads, decays.key = key, read_out.value = value;
    decays.f = input(key, -90, 90);
    decays.rate = arena.floats(heads, 1, 16), decays.bias = arena.floats(heads * key, -5, 5);
    decays.out = rows(arena, s, key, KDN_FLOAT32, 0, 0, true);
    decays.d_out = input(key, -1, 1), decays.d_f = result(decays.f);
    decays.d_rate = arena.result<float>(s.batch * heads);
    decays.d_bias = arena.result<float>(s.batch * heads * key);

    read_out.x = input(value, -2, 2);
    read_out.weight = arena.floats(value, 0, 2);
    read_out.eps = 1e-5f, read_out.silu = heads_up();
    read_out.y = result(read_out.x), read_out.d_x = result(read_out.x);
    if (heads_up()) read_out.gate = input(value, -90, 90), read_out.d_gate = result(read_out.gate);
    read_out.d_y = input(value, -1, 1);
    read_out.d_weight = arena.result<float>(s.batch * heads * value * ((s.time + KDN_PIECE - 1) / KDN_PIECE));

    const Sizes flat{s.batch, s.time, 1};
    auto flat_rows = [&](bool out) { return rows(arena, flat, value, type(), -90, 90, out); };
    swiglu.batch = s.batch, swiglu.time = s.time;
    swiglu.gate = flat_rows(false), swiglu.up = flat_rows(false), swiglu.d_y = flat_rows(false);
    swiglu.y = flat_rows(true), swiglu.d_gate = flat_rows(true), swiglu.d_up = flat_rows(true);

    const KdnType same = type();
    weight = rows(arena, {1, value, 1}, key, same, -2, 2, false);
    row = rows(arena, {1, 1, 1}, key, same, -2, 2, false);
    if (heads_up()) bias = rows(arena, {1, 1, 1}, value, same, -2, 2, false);
    product = rows(arena, {1, 1, 1}, value, same, 0, 0, true);

    loss.rows = s.time;
    loss.logits = rows(arena, {1, s.time, 1}, value, type(), -90, 90, false);
    arena.results.push_back(arena.blocks.back().get());  // written in place
    int64_t* labels = (int64_t*)arena.take(s.time * 8).data;
    for (int64_t t = 0; t < s.time; ++t) labels[t] = whole(0, value - 1);
    loss.labels = labels;
    loss.loss = arena.result<float>(s.time);
    loss.gradient = heads_up();

    const Sizes one{count, 1, heads};
    auto token = [&](int64_t channels, float low, float high, bool out = false) {
      return rows(arena, one, channels, type(), low, high, out);
    };
    decode.count = count, decode.heads = heads, decode.key = key, decode.value = value;
    decode.kind = (int32_t)whole(0, 2);
    decode.q = token(key, -1, 1), decode.v = token(value, -1, 1);
    if (decode.kind != KDN_GIVEN || heads_up()) decode.k = token(key, -unit, unit);
    if (decay) decode.decay = token(decay == 1 ? 1 : key, strongest, 0);
    if (decode.kind == KDN_GIVEN) {
      decode.gain = token(key, -unit, unit);
    } else {
      decode.noise = token(decode.kind == KDN_DIAGONAL ? key : 1, 0, 1);
      decode.obs = token(1, 0.01f, 1);
      decode.info_scale = arena.floats(heads, 0.5f, 2.f * key);
      const int64_t covs = count * heads * (decode.kind == KDN_DIAGONAL ? key : 1);
      decode.cov = arena.result<float>(covs);
      for (int64_t i = 0; i < covs; ++i) decode.cov[i] = between(0.1f, 2);
    }
    decode.state = arena.result<float>(states);
    for (int64_t i = 0; i < states; ++i) decode.state[i] = between(-1, 1);
    decode.scale = unit;
    decode.out = token(value, 0, 0, true);
  }

  void run(int threads) {
    kdn_memory_forward(&memory, threads);
    kdn_memory_backward(&memory, threads);
    kdn_diagonal_forward(&gain[0], threads);
    kdn_diagonal_backward(&gain[0], threads);
    kdn_isotropic_forward(&gain[1], threads);
    kdn_isotropic_backward(&gain[1], threads);
    kdn_exact_forward(&gain[2], threads);
    kdn_exact_backward(&gain[2], threads);
    kdn_decode(&decode, threads);
    kdn_conv_forward(&conv, threads);
    kdn_conv_backward(&conv, threads);
    kdn_decay_forward(&decays, threads);
    kdn_decay_backward(&decays, threads);
    kdn_read_out_forward(&read_out, threads);
    kdn_read_out_backward(&read_out, threads);
    kdn_swiglu_forward(&swiglu, threads);
    kdn_swiglu_backward(&swiglu, threads);
    kdn_softmax_loss(&loss, threads);
    kdn_matrix_vector(weight.data, weight.time, product.channels, row.channels, row.data, bias.data, product.data, (KdnType)weight.type,
                      threads);
  }
};

int check(uint64_t seed) {
  Case one(seed), several(seed);
  one.run(1);
  several.run(3);
  for (size_t i = 0; i < one.arena.results.size(); ++i) {
    const Block &a = *one.arena.results[i], &b = *several.arena.results[i];
    if (a.size != b.size || std::memcmp(a.data, b.data, a.size)) {
      std::printf("%s, seed %llu: result %zu differs between 1 and 3 threads\n", kdn_isa(),
                  (unsigned long long)seed, i);
      return 1;
    }
  }
  const KdnMemory& m = one.memory;
  for (int64_t i = 0; i < m.sequences.count * m.heads * m.key * m.value; ++i)
    if (!std::isfinite(m.state[i])) {
      std::printf("%s, seed %llu: the state is not finite\n", kdn_isa(), (unsigned long long)seed);
      return 1;
    }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const int cases = argc > 1 ? std::atoi(argv[1]) : 100;
  for (const char* name : {"avx512", "avx2", "baseline"}) {
    if (!kdn_set_isa(name)) {
      std::printf("%s: not on this machine\n", name);
      continue;
    }
    for (int seed = 1; seed <= cases; ++seed)
      if (check(seed)) return 1;
    std::printf("%s: %d cases, nothing found\n", name, cases);
    std::fflush(stdout);
  }
}
