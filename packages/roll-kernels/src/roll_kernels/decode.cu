// CUDA version of `decode.cpp`: operations of a decoding step between its matrix products. The same functions on device
// memory, launched on a stream.
//
// N rows    C hidden size    H query heads    K key/value heads    G = H / K    D head size    I intermediate size
//
// Depends only on the CUDA runtime. Rounds to bfloat16 at the same places as transformers; NaN stays NaN.

#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>
#include <cstring>

// The same layout as in `decode.cpp`; `decode.py` fills it in. It must stay outside of the anonymous namespace: nvcc
// drops functions with an argument of a type in there, here `roll_attend`.
struct Attention {
  int64_t num_heads, num_kv_heads, head_dim;
  int64_t row_stride, head_stride;  // of keys and values, in elements
  float scale, epsilon;
  int64_t threads;  // CPU threads; unused here
};

namespace {

constexpr int THREADS = 128;             // per block; a power of two, for the reduction in `combined`
constexpr int MOST_OWNED = 4;            // maximum number of elements of a head that one thread accumulates
constexpr int64_t LARGEST_HEAD = THREADS * MOST_OWNED;

struct BFloat16 {
  uint16_t bits;
};

__device__ inline float load(float x) { return x; }

__device__ inline float load(BFloat16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float found;
  memcpy(&found, &bits, sizeof found);
  return found;
}

__device__ inline void store(float x, float* to) { *to = x; }

__device__ inline void store(float x, BFloat16* to) {  // rounded to the nearest, ties to even
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  const uint32_t up = bits + 0x7fff + ((bits >> 16) & 1);
  const bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
  to->bits = static_cast<uint16_t>((is_nan ? bits | 0x400000 : up) >> 16);
}

template <typename T>
__device__ inline float rounded(float x) {
  T found;
  store(x, &found);
  return load(found);
}

struct Sum {
  __device__ float operator()(float x, float y) const { return x + y; }
};

struct Largest {
  __device__ float operator()(float x, float y) const { return fmaxf(x, y); }
};

// Block-wide reduction of one value per thread; all threads get the result.
template <typename Combine>
__device__ float combined(float mine, Combine combine) {
  __shared__ float all[THREADS];
  all[threadIdx.x] = mine;
  __syncthreads();
  for (unsigned half = THREADS / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) all[threadIdx.x] = combine(all[threadIdx.x], all[threadIdx.x + half]);
    __syncthreads();
  }
  const float found = all[0];
  __syncthreads();  // before the next call writes to `all`
  return found;
}

// One block per row.
template <typename T>
__global__ void add_norm(T* hidden, const T* added, const T* weight, T* out, int64_t size, float epsilon) {
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * size;
  float squares = 0;
  for (int64_t c = threadIdx.x; c < size; c += THREADS) {
    if (added != nullptr) store(load(hidden[begin + c]) + load(added[begin + c]), &hidden[begin + c]);
    const float x = load(hidden[begin + c]);
    squares += x * x;
  }
  const float scale = 1.0f / sqrtf(combined(squares, Sum()) / size + epsilon);
  for (int64_t c = threadIdx.x; c < size; c += THREADS) {
    store(rounded<T>(load(hidden[begin + c]) * scale) * load(weight[c]), &out[begin + c]);
  }
}

// One block per row.
template <typename T>
__global__ void gate(const T* gate_up, T* out, int64_t size) {
  const T* gates = gate_up + 2 * static_cast<int64_t>(blockIdx.x) * size;
  T* found = out + static_cast<int64_t>(blockIdx.x) * size;
  for (int64_t i = threadIdx.x; i < size; i += THREADS) {
    const float x = load(gates[i]);
    store(rounded<T>(x / (1.0f + expf(-x))) * load(gates[size + i]), &found[i]);
  }
}

// RMSNorm of a head (unless `weight` is null), then RoPE: x * cos + roll(x, D / 2) * sin; the sines include the sign of
// rotate-half.
template <typename T, typename Into>
__device__ void turn(const T* head, const float* weight, const float* cos, const float* sin, float epsilon,
                     int64_t size, Into* out) {
  float scale = 1.0f;
  if (weight != nullptr) {
    float squares = 0;
    for (int64_t d = threadIdx.x; d < size; d += THREADS) squares += load(head[d]) * load(head[d]);
    scale = 1.0f / sqrtf(combined(squares, Sum()) / size + epsilon);
  }
  const int64_t half = size / 2;
  for (int64_t d = threadIdx.x; d < half; d += THREADS) {
    const float low = load(head[d]) * scale * (weight == nullptr ? 1.0f : weight[d]);
    const float high = load(head[d + half]) * scale * (weight == nullptr ? 1.0f : weight[d + half]);
    store(low * cos[d] + high * sin[d], &out[d]);
    store(high * cos[d + half] + low * sin[d + half], &out[d + half]);
  }
}

// Attention of one query head over `width` positions, THREADS positions at a time. Online softmax: partial sums are
// rescaled when the maximum score grows (Milakov & Gimelshein 2018, arXiv:1805.02867).
template <typename T>
__device__ void attend_head(const float* query, const T* keys, const T* values, int64_t width, int64_t size,
                            float scale, T* out) {
  __shared__ float weights[THREADS];
  float sums[MOST_OWNED] = {};
  float largest = -INFINITY, total = 0;
  for (int64_t begin = 0; begin < width; begin += THREADS) {
    const int64_t w = begin + threadIdx.x, num = width - begin < THREADS ? width - begin : THREADS;
    float score = -INFINITY;
    if (w < width) {
      float sum = 0;
      for (int64_t d = 0; d < size; ++d) sum += query[d] * load(keys[w * size + d]);
      score = scale * sum;
    }
    const float before = largest;
    largest = fmaxf(largest, combined(score, Largest()));
    const float smaller = expf(before - largest);
    weights[threadIdx.x] = w < width ? expf(score - largest) : 0.0f;
    total = total * smaller + combined(weights[threadIdx.x], Sum());  // also synchronizes: all weights are written
    for (int own = 0; own < MOST_OWNED; ++own) {
      const int64_t d = threadIdx.x + static_cast<int64_t>(own) * THREADS;
      if (d >= size) break;
      float sum = sums[own] * smaller;
      for (int64_t i = 0; i < num; ++i) sum += weights[i] * load(values[(begin + i) * size + d]);
      sums[own] = sum;
    }
    __syncthreads();  // before the next iteration overwrites `weights`
  }
  for (int own = 0; own < MOST_OWNED; ++own) {
    const int64_t d = threadIdx.x + static_cast<int64_t>(own) * THREADS;
    if (d < size) store(sums[own] / total, &out[d]);
  }
}

// One block per row and key/value head; it computes all query heads of that head.
template <typename T>
__global__ void attend(Attention a, const T* qkv, const float* norm, const float* cos, const float* sin, T* keys,
                       T* values, const int64_t* lengths, T* out) {
  __shared__ float query[LARGEST_HEAD];
  const int64_t n = blockIdx.x / a.num_kv_heads, k = blockIdx.x % a.num_kv_heads;
  const int64_t groups = a.num_heads / a.num_kv_heads, size = a.head_dim, at = lengths[n];
  const T* heads = qkv + n * (a.num_heads + 2 * a.num_kv_heads) * size;
  T* row_keys = keys + n * a.row_stride + k * a.head_stride;
  T* row_values = values + n * a.row_stride + k * a.head_stride;
  const float *cosines = cos + at * size, *sines = sin + at * size;
  const int64_t key = a.num_heads + k;
  turn(heads + key * size, norm == nullptr ? nullptr : norm + key * size, cosines, sines, a.epsilon, size,
       row_keys + at * size);
  for (int64_t d = threadIdx.x; d < size; d += THREADS) {
    row_values[at * size + d] = heads[(key + a.num_kv_heads) * size + d];
  }
  for (int64_t head = k * groups; head < (k + 1) * groups; ++head) {
    turn(heads + head * size, norm == nullptr ? nullptr : norm + head * size, cosines, sines, a.epsilon, size, query);
    __syncthreads();  // makes the query, and in the first iteration the new key and value, visible to all threads
    attend_head(query, row_keys, row_values, at + 1, size, a.scale, out + (n * a.num_heads + head) * size);
    __syncthreads();
  }
}

// Returns 0 or a CUDA error code.
template <typename... Parameters, typename... Arguments>
int launch(void* stream, int64_t blocks, void (*kernel)(Parameters...), Arguments... arguments) {
  if (blocks == 0) return cudaSuccess;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(THREADS);
  config.stream = static_cast<cudaStream_t>(stream);
  return cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...);
}

template <typename T>
T* as(void* memory) {
  return static_cast<T*>(memory);
}

template <typename T>
const T* as(const void* memory) {
  return static_cast<const T*>(memory);
}

}  // namespace

// `decode.cpp` documents these functions. All pointers except `shape` point to device memory.
extern "C" {

int roll_add_norm(int low, void* hidden, const void* added, const void* weight, void* out, int64_t num, int64_t size,
                  float epsilon, void* stream) {
  const auto call = [&](auto zero) {
    using T = decltype(zero);
    return launch(stream, num, add_norm<T>, as<T>(hidden), as<T>(added), as<T>(weight), as<T>(out), size, epsilon);
  };
  return low ? call(BFloat16{}) : call(0.0f);
}

int roll_gate(int low, const void* gate_up, void* out, int64_t num, int64_t size, void* stream) {
  const auto call = [&](auto zero) {
    using T = decltype(zero);
    return launch(stream, num, gate<T>, as<T>(gate_up), as<T>(out), size);
  };
  return low ? call(BFloat16{}) : call(0.0f);
}

int roll_attend(int low, const Attention* shape, const void* qkv, const float* norm, const float* cos,
                const float* sin, void* keys, void* values, const int64_t* lengths, void* out, int64_t num,
                void* stream) {
  if (shape->head_dim > LARGEST_HEAD) return cudaErrorInvalidValue;
  const auto call = [&](auto zero) {
    using T = decltype(zero);
    return launch(stream, num * shape->num_kv_heads, attend<T>, *shape, as<T>(qkv), norm, cos, sin, as<T>(keys),
                  as<T>(values), lengths, as<T>(out));
  };
  return low ? call(BFloat16{}) : call(0.0f);
}

}  // extern "C"
