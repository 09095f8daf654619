// What a decoding step does between its matrix products, each in one pass over memory.
//
// N rows    C hidden size    H query heads    K key/value heads    G = H / K    D head size    I intermediate size
//
// Plain C calls on plain memory: no header of torch, so that it compiles in seconds. Activations, keys and values are
// float or bfloat16 (`low`). Rounding to bfloat16 happens where transformers rounds. NaN stays NaN: compile without
// -ffinite-math-only.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

constexpr int64_t PARALLEL_FROM = 1 << 14;  // numbers touched; below, waking the other threads costs more
constexpr int64_t TILE = 64;                // positions whose keys stay in the first-level cache for all query heads

struct BFloat16 {
  uint16_t bits;
};

inline float load(float x) { return x; }

inline float load(BFloat16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float found;
  std::memcpy(&found, &bits, sizeof found);
  return found;
}

template <typename T>
inline T rounded(float x);

template <>
inline float rounded<float>(float x) {
  return x;
}

template <>
inline BFloat16 rounded<BFloat16>(float x) {  // to the nearest, ties to even
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const uint32_t up = bits + 0x7fff + ((bits >> 16) & 1);
  const bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
  return {static_cast<uint16_t>((is_nan ? bits | 0x400000 : up) >> 16)};
}

// e^x to two units in the last place; 0 far below, NaN for NaN. Written out so that compilers vectorise it.
inline float exponential(float x) {
  x = x < -87.3f ? -87.3f : x;
  x = x > 88.0f ? 88.0f : x;
  const float n = std::nearbyint(x * 1.44269504f);
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const int32_t bits = (static_cast<int32_t>(n) + 127) << 23;
  float scale;
  std::memcpy(&scale, &bits, sizeof scale);
  return p * scale;
}

template <typename T>
void add_norm(T* hidden, const T* added, const T* weight, T* out, int64_t num, int64_t size, float epsilon,
              int threads) {
#pragma omp parallel for num_threads(threads) if (num * size >= PARALLEL_FROM)
  for (int64_t n = 0; n < num; ++n) {
    T* row = hidden + n * size;
    if (added != nullptr) {
      const T* more = added + n * size;
      for (int64_t c = 0; c < size; ++c) row[c] = rounded<T>(load(row[c]) + load(more[c]));
    }
    float squares = 0;
    for (int64_t c = 0; c < size; ++c) squares += load(row[c]) * load(row[c]);
    const float scale = 1.0f / std::sqrt(squares / size + epsilon);
    T* found = out + n * size;
    for (int64_t c = 0; c < size; ++c) found[c] = rounded<T>(load(rounded<T>(load(row[c]) * scale)) * load(weight[c]));
  }
}

template <typename T>
void gate(const T* gate_up, T* out, int64_t num, int64_t size, int threads) {
#pragma omp parallel for num_threads(threads) if (num * size >= PARALLEL_FROM)
  for (int64_t n = 0; n < num; ++n) {
    const T* gates = gate_up + 2 * n * size;
    const T* ups = gates + size;
    T* found = out + n * size;
    for (int64_t i = 0; i < size; ++i) {
      const float x = load(gates[i]);
      found[i] = rounded<T>(load(rounded<T>(x / (1.0f + exponential(-x)))) * load(ups[i]));
    }
  }
}

struct Attention {
  int64_t num_heads, num_kv_heads, head_dim;
  int64_t row_stride, head_stride;  // of keys and values, in numbers
  float scale, epsilon;
  int64_t threads;
};

// A head normed (where `weight` is given) and turned: x * cos + roll(x, D / 2) * sin, the sign in the sines.
template <typename T>
inline void turn(const T* head, const float* weight, const float* cos, const float* sin, float epsilon, int64_t size,
                 float* out) {
  float squares = 0;
  for (int64_t d = 0; d < size; ++d) squares += load(head[d]) * load(head[d]);
  const float scale = weight == nullptr ? 1.0f : 1.0f / std::sqrt(squares / size + epsilon);
  const int64_t half = size / 2;
  for (int64_t d = 0; d < half; ++d) {
    const float low = load(head[d]) * scale * (weight == nullptr ? 1.0f : weight[d]);
    const float high = load(head[d + half]) * scale * (weight == nullptr ? 1.0f : weight[d + half]);
    out[d] = low * cos[d] + high * sin[d];
    out[d + half] = high * cos[d + half] + low * sin[d + half];
  }
}

// SIZE > 0 is a head size that the compiler knows, so that sums stay in registers; 0 takes `any_size`.
template <int64_t SIZE, typename T>
inline float product(const float* __restrict x, const T* __restrict y, int64_t any_size) {
  float sum = 0;
  const int64_t size = SIZE > 0 ? SIZE : any_size;
  for (int64_t d = 0; d < size; ++d) sum += x[d] * load(y[d]);
  return sum;
}

// out [D] += weights [num] @ values [num, D].
template <int64_t SIZE, typename T>
inline void add_weighted(const float* __restrict weights, const T* __restrict values, int64_t num, int64_t any_size,
                         float* __restrict out) {
  if constexpr (SIZE > 0) {
    float sums[SIZE];
    for (int64_t d = 0; d < SIZE; ++d) sums[d] = out[d];
    for (int64_t w = 0; w < num; ++w) {
      for (int64_t d = 0; d < SIZE; ++d) sums[d] += weights[w] * load(values[w * SIZE + d]);
    }
    for (int64_t d = 0; d < SIZE; ++d) out[d] = sums[d];
  } else {
    for (int64_t w = 0; w < num; ++w) {
      for (int64_t d = 0; d < any_size; ++d) out[d] += weights[w] * load(values[w * any_size + d]);
    }
  }
}

inline void softmax(float* __restrict row, int64_t width) {
  float largest = row[0];
  for (int64_t w = 1; w < width; ++w) largest = row[w] > largest ? row[w] : largest;
  float total = 0;
  for (int64_t w = 0; w < width; ++w) {
    row[w] = exponential(row[w] - largest);
    total += row[w];
  }
  const float inverse = 1.0f / total;
  for (int64_t w = 0; w < width; ++w) row[w] *= inverse;
}

// One key/value head of one row, all its query heads. `query` is [G, D], `weights` room for [G, width].
template <int64_t SIZE, typename T>
void attend_head(const float* query, const T* keys, const T* values, int64_t width, int64_t groups, int64_t any_size,
                 float scale, float* weights, float* out) {
  const int64_t size = SIZE > 0 ? SIZE : any_size;
  for (int64_t start = 0; start < width; start += TILE) {
    const int64_t end = std::min(width, start + TILE);
    for (int64_t g = 0; g < groups; ++g) {
      for (int64_t w = start; w < end; ++w) {
        weights[g * width + w] = scale * product<SIZE>(query + g * size, keys + w * size, size);
      }
    }
  }
  for (int64_t g = 0; g < groups; ++g) softmax(weights + g * width, width);
  std::fill(out, out + groups * size, 0.0f);
  for (int64_t start = 0; start < width; start += TILE) {
    const int64_t num = std::min(width - start, TILE);
    for (int64_t g = 0; g < groups; ++g) {
      add_weighted<SIZE>(weights + g * width + start, values + start * size, num, size, out + g * size);
    }
  }
}

template <typename T>
using AttendHead = void (*)(const float*, const T*, const T*, int64_t, int64_t, int64_t, float, float*, float*);

template <typename T>
AttendHead<T> attend_head_of(int64_t size) {
  switch (size) {
    case 32: return attend_head<32, T>;
    case 64: return attend_head<64, T>;
    case 128: return attend_head<128, T>;
    default: return attend_head<0, T>;
  }
}

template <typename T>
void attend(const Attention& a, const T* qkv, const float* norm, const float* cos, const float* sin, T* keys, T* values,
            const int64_t* lengths, T* out, int64_t num) {
  const int64_t groups = a.num_heads / a.num_kv_heads, size = a.head_dim;
  const int64_t heads = a.num_heads + 2 * a.num_kv_heads;
  const AttendHead<T> attend_one = attend_head_of<T>(size);
  int64_t work = 0;
  for (int64_t n = 0; n < num; ++n) work += (lengths[n] + 1) * a.num_heads * size;
#pragma omp parallel num_threads(static_cast<int>(a.threads)) if (work >= PARALLEL_FROM)
  {
    std::vector<float> query(groups * size), key(size), found(groups * size), weights;
#pragma omp for collapse(2) schedule(dynamic, 4)
    for (int64_t n = 0; n < num; ++n) {
      for (int64_t k = 0; k < a.num_kv_heads; ++k) {
        const int64_t at = lengths[n], width = at + 1;
        T* row_keys = keys + n * a.row_stride + k * a.head_stride;
        T* row_values = values + n * a.row_stride + k * a.head_stride;
        const auto turned = [&](int64_t head, float* into) {
          turn(qkv + (n * heads + head) * size, norm == nullptr ? nullptr : norm + head * size, cos + at * size,
               sin + at * size, a.epsilon, size, into);
        };
        for (int64_t g = 0; g < groups; ++g) turned(k * groups + g, query.data() + g * size);
        turned(a.num_heads + k, key.data());
        const T* value = qkv + (n * heads + a.num_heads + a.num_kv_heads + k) * size;
        for (int64_t d = 0; d < size; ++d) {
          row_keys[at * size + d] = rounded<T>(key[d]);
          row_values[at * size + d] = value[d];
        }
        if (static_cast<int64_t>(weights.size()) < groups * width) weights.resize(2 * groups * width);
        attend_one(query.data(), row_keys, row_values, width, groups, size, a.scale, weights.data(), found.data());
        T* target = out + (n * a.num_heads + k * groups) * size;
        for (int64_t i = 0; i < groups * size; ++i) target[i] = rounded<T>(found[i]);
      }
    }
  }
}

}  // namespace

extern "C" {

// hidden [N, C] += added [N, C] (may be null); out [N, C] = hidden / sqrt(mean(hidden²) + epsilon) * weight [C].
void roll_add_norm(int low, void* hidden, const void* added, const void* weight, void* out, int64_t num, int64_t size,
                   float epsilon, int threads) {
  const auto call = [&](auto zero) {
    using T = decltype(zero);
    add_norm(static_cast<T*>(hidden), static_cast<const T*>(added), static_cast<const T*>(weight),
             static_cast<T*>(out), num, size, epsilon, threads);
  };
  low ? call(BFloat16{}) : call(0.0f);
}

// out [N, I] = silu(gate_up[:, :I]) * gate_up[:, I:].
void roll_gate(int low, const void* gate_up, void* out, int64_t num, int64_t size, int threads) {
  const auto call = [&](auto zero) {
    using T = decltype(zero);
    gate(static_cast<const T*>(gate_up), static_cast<T*>(out), num, size, threads);
  };
  low ? call(BFloat16{}) : call(0.0f);
}

// qkv [N, H + 2 K, D]: queries and keys are normed (norm [H + K, D], may be null) and turned, keys and values are put at
// position lengths[n] of their row, and each query sees the positions up to it. out [N, H, D].
void roll_attend(int low, const Attention* shape, const void* qkv, const float* norm, const float* cos,
                 const float* sin, void* keys, void* values, const int64_t* lengths, void* out, int64_t num) {
  const auto call = [&](auto zero) {
    using T = decltype(zero);
    attend(*shape, static_cast<const T*>(qkv), norm, cos, sin, static_cast<T*>(keys), static_cast<T*>(values), lengths,
           static_cast<T*>(out), num);
  };
  low ? call(BFloat16{}) : call(0.0f);
}

}  // extern "C"
