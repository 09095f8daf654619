// Operations of a decoding step between its matrix products, each in one pass over memory.
//
// N rows    C hidden size    H query heads    K key/value heads    G = H / K    D head size    I intermediate size
//
// Plain C functions on raw memory, without torch headers, so it compiles in seconds. Activations, keys and values are
// float or bfloat16 (`low` != 0). Rounds to bfloat16 at the same places as transformers. NaN must stay NaN: compile
// without -ffinite-math-only.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "kernels.h"

namespace {

constexpr int64_t PARALLEL_FROM = 1 << 14;  // elements processed; below, starting threads costs more than it saves

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
  int64_t row_stride, head_stride;  // of keys and values, in elements
  float scale, epsilon;
  int64_t threads;
};

// RMSNorm of a head (unless `weight` is null), then RoPE: x * cos + roll(x, D / 2) * sin; the sines include the sign of
// rotate-half.
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

// Number of floats in a vector register.
#if defined(__AVX512F__)
constexpr int64_t LANES = 16;
#elif defined(__AVX__)
constexpr int64_t LANES = 8;
#else
constexpr int64_t LANES = 4;
#endif
typedef float Lanes __attribute__((vector_size(LANES * sizeof(float))));
typedef int32_t Places __attribute__((vector_size(LANES * sizeof(int32_t))));

inline Lanes load_lanes(const float* from) {
  Lanes found;
  std::memcpy(&found, from, sizeof found);
  return found;
}

inline Lanes load_lanes(const BFloat16* from) {
  typedef uint16_t Halves __attribute__((vector_size(LANES * sizeof(uint16_t))));
  typedef uint32_t Words __attribute__((vector_size(LANES * sizeof(uint32_t))));
  Halves bits;
  std::memcpy(&bits, from, sizeof bits);
  const Words words = __builtin_convertvector(bits, Words) << 16;
  Lanes found;
  std::memcpy(&found, &words, sizeof found);
  return found;
}

// For each group of 2 * STEP lanes: the sum of the first and second half of x's group, then that of y's group.
template <int64_t STEP, size_t... I>
inline Lanes halves_added(Lanes x, Lanes y, std::index_sequence<I...>) {
#define ROLL_PLACE (I / (2 * STEP) * 2 * STEP + I % (2 * STEP) + (I % (2 * STEP) < STEP ? 0 : LANES - STEP))
#if defined(__clang__)
  return __builtin_shufflevector(x, y, ROLL_PLACE...) + __builtin_shufflevector(x, y, (ROLL_PLACE + STEP)...);
#else
  constexpr Places low = {static_cast<int32_t>(ROLL_PLACE)...};
  constexpr Places high = {static_cast<int32_t>(ROLL_PLACE + STEP)...};
  return __builtin_shuffle(x, y, low) + __builtin_shuffle(x, y, high);
#endif
#undef ROLL_PLACE
}

// Horizontal sums of LANES vectors: lane i of the result is the sum of parts[i]. Overwrites `parts`.
template <int64_t STEP = 1>
inline Lanes sums_of(Lanes* parts) {
  constexpr int64_t num = LANES / STEP;
  if constexpr (num == 1) {
    return parts[0];
  } else {
#pragma GCC unroll 16
    for (int64_t i = 0; i < num / 2; ++i) {
      parts[i] = halves_added<STEP>(parts[2 * i], parts[2 * i + 1], std::make_index_sequence<LANES>());
    }
    return sums_of<2 * STEP>(parts);
  }
}

// Prefetches memory that the next computation reads; never faults. The keys of one head of one row are too short a
// stream for the hardware prefetcher. Prefetches into the L2 cache: keys and values of two heads do not fit into L1.
inline void fetch(const void* from, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(static_cast<const char*>(from) + at, 0, 2);
}

// Scores of HEADS query heads against LANES / HEADS positions. Consecutive heads are `out_stride` apart in `out`.
template <int64_t SIZE, int64_t HEADS, typename T>
inline void score_block(const float* query, const T* keys, float scale, float* out, int64_t out_stride) {
  constexpr int64_t positions = LANES / HEADS;
  Lanes parts[LANES] = {};
#pragma GCC unroll 1
  for (int64_t d = 0; d < SIZE; d += LANES) {
    Lanes asked[HEADS];
#pragma GCC unroll 2
    for (int64_t h = 0; h < HEADS; ++h) asked[h] = load_lanes(query + h * SIZE + d);
#pragma GCC unroll 16
    for (int64_t w = 0; w < positions; ++w) {
      const Lanes key = load_lanes(keys + w * SIZE + d);
#pragma GCC unroll 2
      for (int64_t h = 0; h < HEADS; ++h) parts[h * positions + w] += asked[h] * key;
    }
  }
  const Lanes found = scale * sums_of(parts);
  for (int64_t h = 0; h < HEADS; ++h) {
    std::memcpy(out + h * out_stride, reinterpret_cast<const float*>(&found) + h * positions,
                positions * sizeof(float));
  }
}

// out [HEADS, num], with row stride `out_stride`, = scale * query [HEADS, D] @ keys [num, D]^T. SIZE > 0 is a head size
// known at compile time, a multiple of LANES, so that sums stay in registers; SIZE = 0 uses `any_size`. Prefetches
// `next`.
template <int64_t SIZE, int64_t HEADS, typename T>
inline void score(const float* query, const T* keys, const T* next, int64_t num, int64_t any_size, float scale,
                  float* out, int64_t out_stride) {
  constexpr int64_t positions = LANES / HEADS;
  int64_t w = 0;
  if constexpr (SIZE > 0) {
    for (; w + positions <= num; w += positions) {
      fetch(next + w * SIZE, positions * SIZE * sizeof(T));
      score_block<SIZE, HEADS>(query, keys + w * SIZE, scale, out + w, out_stride);
    }
    if (w < num && num >= positions) {  // the last block overlaps positions that are already computed
      w = num - positions;
      score_block<SIZE, HEADS>(query, keys + w * SIZE, scale, out + w, out_stride);
      return;
    }
  }
  const int64_t size = SIZE > 0 ? SIZE : any_size;
  for (; w < num; ++w) {
    for (int64_t h = 0; h < HEADS; ++h) {
      float sum = 0;
      for (int64_t d = 0; d < size; ++d) sum += query[h * size + d] * load(keys[w * size + d]);
      out[h * out_stride + w] = scale * sum;
    }
  }
}

// out [HEADS, D] = weights [HEADS, num], with row stride `stride`, @ values [num, D]. Prefetches `next`.
template <int64_t SIZE, int64_t HEADS, typename T>
inline void weigh(const float* weights, int64_t stride, const T* values, const T* next, int64_t num, int64_t any_size,
                  float* out) {
  if constexpr (SIZE > 0) {
    Lanes sums[HEADS][SIZE / LANES] = {};
    for (int64_t w = 0; w < num; ++w) {
      fetch(next + w * SIZE, SIZE * sizeof(T));
#pragma GCC unroll 16
      for (int64_t d = 0; d < SIZE / LANES; ++d) {
        const Lanes value = load_lanes(values + w * SIZE + d * LANES);
#pragma GCC unroll 2
        for (int64_t h = 0; h < HEADS; ++h) sums[h][d] += weights[h * stride + w] * value;
      }
    }
    std::memcpy(out, sums, sizeof sums);
  } else {
    std::fill(out, out + HEADS * any_size, 0.0f);
    for (int64_t w = 0; w < num; ++w) {
      for (int64_t h = 0; h < HEADS; ++h) {
        const float weight = weights[h * stride + w];
        for (int64_t d = 0; d < any_size; ++d) out[h * any_size + d] += weight * load(values[w * any_size + d]);
      }
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

// Attention of HEADS query heads of one key/value head of one row. `weights` is scratch space for [HEADS, width].
template <int64_t SIZE, int64_t HEADS, typename T>
inline void attend_heads(const float* query, const T* keys, const T* values, const T* next, int64_t width, int64_t size,
                         float scale, float* weights, float* out) {
  score<SIZE, HEADS>(query, keys, values, width, size, scale, weights, width);
  for (int64_t h = 0; h < HEADS; ++h) softmax(weights + h * width, width);
  weigh<SIZE, HEADS>(weights, width, values, next, width, size, out);
}

// Attention of all query heads [G, D] of one key/value head of one row, two at a time to reuse loaded keys and values.
// `weights` is scratch space for [2, width]; `next` points to the keys of the next head, which are prefetched.
template <int64_t SIZE, typename T>
void attend_head(const float* query, const T* keys, const T* values, const T* next, int64_t width, int64_t groups,
                 int64_t any_size, float scale, float* weights, float* out) {
  const int64_t size = SIZE > 0 ? SIZE : any_size, even = groups / 2 * 2;
  for (int64_t g = 0; g < even; g += 2) {
    attend_heads<SIZE, 2>(query + g * size, keys, values, next, width, size, scale, weights, out + g * size);
  }
  if (even < groups) {
    attend_heads<SIZE, 1>(query + even * size, keys, values, next, width, size, scale, weights, out + even * size);
  }
}

template <typename T>
using AttendHead = decltype(&attend_head<0, T>);

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
        const bool same_row = k + 1 < a.num_kv_heads;
        const T* next = keys + (same_row ? n : n + 1) * a.row_stride + (same_row ? k + 1 : 0) * a.head_stride;
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
        if (static_cast<int64_t>(weights.size()) < 2 * width) weights.resize(4 * width);
        attend_one(query.data(), row_keys, row_values, next, width, groups, size, a.scale, weights.data(),
                   found.data());
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

// qkv [N, H + 2 K, D]: norms (norm [H + K, D], may be null) and rotates (RoPE) queries and keys, writes keys and values
// to position lengths[n] of row n, and attends to positions 0 to lengths[n] inclusive. out [N, H, D].
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
