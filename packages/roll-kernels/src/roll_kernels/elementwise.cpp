// Element-wise training operations, forward and backward, each in one pass over memory.
//
// N rows    D their size
//
// C functions on raw memory, without torch headers, so that the file compiles in seconds. Tensors are float or bfloat16
// (`low`). Values are rounded to bfloat16 where transformers rounds; sums are accumulated in float. NaN stays NaN:
// compile without -ffinite-math-only.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#include "kernels.h"

namespace {

constexpr int64_t PARALLEL_FROM = 1 << 15;  // elements; for fewer, waking other threads costs more than it saves
constexpr int64_t SPAN = 1 << 12;           // elements that a thread processes at a time where there are no rows
constexpr float NEVER = -1e4f;              // lower bound of log probabilities multiplied by a probability of 0

template <typename T>
void norm(const T* __restrict x, const T* __restrict weight, T* __restrict y, float* __restrict scales, int64_t num,
          int64_t size, float epsilon, int threads) {
#pragma omp parallel for num_threads(threads) if (num * size >= PARALLEL_FROM)
  for (int64_t n = 0; n < num; ++n) {
    const T* row = x + n * size;
    T* found = y + n * size;
    float squares = 0;
    for (int64_t d = 0; d < size; ++d) squares += load(row[d]) * load(row[d]);
    const float scale = 1.0f / std::sqrt(squares / size + epsilon);
    scales[n] = scale;
    for (int64_t d = 0; d < size; ++d) found[d] = rounded<T>(load(rounded<T>(load(row[d]) * scale)) * load(weight[d]));
  }
}

// The weight's gradient is summed in fixed blocks of rows, so that it does not depend on the number of threads.
template <typename T>
void norm_backward(const T* __restrict x, const T* __restrict weight, const float* __restrict scales,
                   const T* __restrict dy, T* __restrict dx, float* __restrict dweights, int64_t blocks, int64_t num,
                   int64_t size, int threads) {
  const int64_t step = (num + blocks - 1) / blocks;
#pragma omp parallel for num_threads(threads) if (num * size >= PARALLEL_FROM)
  for (int64_t block = 0; block < blocks; ++block) {
    float* __restrict dweight = dweights + block * size;
    std::fill(dweight, dweight + size, 0.0f);
    const int64_t end = std::min(num, (block + 1) * step);
    for (int64_t n = block * step; n < end; ++n) {
      const T* __restrict row = x + n * size;
      const T* __restrict upstream = dy + n * size;
      T* __restrict found = dx + n * size;
      const float scale = scales[n];
      float sum = 0;
      for (int64_t d = 0; d < size; ++d) {
        const float product = load(upstream[d]) * (load(row[d]) * scale);
        dweight[d] += product;
        sum += product * load(weight[d]);
      }
      const float mean = sum / size;
      for (int64_t d = 0; d < size; ++d) {
        const float direct = load(upstream[d]) * load(weight[d]);
        found[d] = rounded<T>(scale * (direct - load(row[d]) * scale * mean));
      }
    }
  }
  for (int64_t block = 1; block < blocks; ++block) {
    for (int64_t d = 0; d < size; ++d) dweights[d] += dweights[block * size + d];
  }
}

template <typename T>
void gate(const T* __restrict gates, const T* __restrict ups, T* __restrict y, int64_t num, int threads) {
#pragma omp parallel for num_threads(threads) if (num >= PARALLEL_FROM)
  for (int64_t start = 0; start < num; start += SPAN) {
    const int64_t end = std::min(num, start + SPAN);
    for (int64_t i = start; i < end; ++i) {
      const float x = load(gates[i]);
      y[i] = rounded<T>(load(rounded<T>(x * sigmoid(x))) * load(ups[i]));
    }
  }
}

// In place: allocating memory for two gradients costs more than computing them.
template <typename T>
void gate_backward(T* __restrict gates, T* __restrict ups, const T* __restrict dy, int64_t num, int threads) {
#pragma omp parallel for num_threads(threads) if (num >= PARALLEL_FROM)
  for (int64_t start = 0; start < num; start += SPAN) {
    const int64_t end = std::min(num, start + SPAN);
    for (int64_t i = start; i < end; ++i) {
      const float x = load(gates[i]), upstream = load(dy[i]), share = sigmoid(x);
      const float silu = x * share;
      gates[i] = rounded<T>(upstream * load(ups[i]) * (share + silu * (1.0f - share)));
      ups[i] = rounded<T>(upstream * silu);
    }
  }
}

// y[d] = x[d] * cos[d] + half(x)[d] * sin[d], with half(x) = (-second half of x, first half of x); the transpose of this map
// if `backward`. Heads and tokens of x may lie anywhere; y is [tokens, heads, size].
template <typename T>
void rotary(const T* __restrict x, const T* __restrict cos, const T* __restrict sin, T* __restrict y, int64_t heads,
            int64_t tokens, int64_t size, int64_t head_stride, int64_t token_stride, bool backward, int threads) {
  const int64_t half = size / 2;
  const float sign = backward ? -1.0f : 1.0f;
#pragma omp parallel for num_threads(threads) if (tokens * heads * size >= PARALLEL_FROM)
  for (int64_t t = 0; t < tokens; ++t) {
    const T *cos1 = cos + t * size, *cos2 = cos1 + half;
    const T *sin1 = sin + t * size, *sin2 = sin1 + half;
    if (backward) std::swap(sin1, sin2);
    for (int64_t h = 0; h < heads; ++h) {
      const T *x1 = x + t * token_stride + h * head_stride, *x2 = x1 + half;
      T *y1 = y + (t * heads + h) * size, *y2 = y1 + half;
      for (int64_t d = 0; d < half; ++d) {
        const float first = load(rounded<T>(load(x1[d]) * load(cos1[d])));
        const float second = load(rounded<T>(load(x2[d]) * load(cos2[d])));
        y1[d] = rounded<T>(first - sign * load(rounded<T>(load(x2[d]) * load(sin1[d]))));
        y2[d] = rounded<T>(second + sign * load(rounded<T>(load(x1[d]) * load(sin2[d]))));
      }
    }
  }
}

// Multiplies a row and returns the largest product, ignoring NaN. Compilers do not vectorise a maximum that respects NaN
// by themselves, hence the lanes.
inline float scale_row(float* __restrict row, int64_t size, float factor) {
  constexpr int64_t LANES = 32;
  float largest[LANES];
  std::fill(largest, largest + LANES, -INFINITY);
  const int64_t whole = size - size % LANES;
  for (int64_t d = 0; d < whole; d += LANES) {
    for (int64_t lane = 0; lane < LANES; ++lane) {
      const float x = row[d + lane] *= factor;
      largest[lane] = x > largest[lane] ? x : largest[lane];
    }
  }
  for (int64_t d = whole; d < size; ++d) {
    row[d] *= factor;
    largest[0] = row[d] > largest[0] ? row[d] : largest[0];
  }
  return *std::max_element(largest, largest + LANES);
}

// Sums over a row are float within a span and double across spans.
void log_softmax(float* __restrict logits, float* __restrict entropies, int64_t num, int64_t size, float temperature,
                 int threads) {
  const float inverse = 1.0f / temperature;
#pragma omp parallel for num_threads(threads) if (num * size >= PARALLEL_FROM)
  for (int64_t n = 0; n < num; ++n) {
    float* __restrict row = logits + n * size;
    const float largest = scale_row(row, size, inverse);
    double sum = 0;
    for (int64_t start = 0; start < size; start += SPAN) {
      const int64_t end = std::min(size, start + SPAN);
      float part = 0;
      for (int64_t d = start; d < end; ++d) part += exponential(row[d] - largest);
      sum += part;
    }
    const float shift = static_cast<float>(std::log(sum));
    double entropy = 0;
    for (int64_t start = 0; start < size; start += SPAN) {
      const int64_t end = std::min(size, start + SPAN);
      for (int64_t d = start; d < end; ++d) row[d] = (row[d] - largest) - shift;
      if (!entropies) continue;
      float part = 0;
      for (int64_t d = start; d < end; ++d) part -= exponential(row[d]) * (row[d] < NEVER ? NEVER : row[d]);
      entropy += part;
    }
    if (entropies) entropies[n] = static_cast<float>(entropy);
  }
}

// Overwrites logp with grad * (onehot(target) - p) - slope * p * (logp + entropy).
void logits_gradient(float* __restrict logp, const int64_t* __restrict targets, const float* __restrict grads,
                     const float* __restrict slopes, const float* __restrict entropies, int64_t num, int64_t size,
                     int threads) {
#pragma omp parallel for num_threads(threads) if (num * size >= PARALLEL_FROM)
  for (int64_t n = 0; n < num; ++n) {
    float* __restrict row = logp + n * size;
    const float grad = grads[n];
    if (slopes) {
      const float slope = slopes[n], entropy = entropies[n];
      for (int64_t d = 0; d < size; ++d) {
        const float value = row[d] < NEVER ? NEVER : row[d];
        row[d] = (-slope * (value + entropy) - grad) * exponential(row[d]);
      }
    } else {
      for (int64_t d = 0; d < size; ++d) row[d] = -grad * exponential(row[d]);
    }
    row[targets[n]] += grad;
  }
}

// Calls `call` with a zero value of the tensors' type.
template <typename Call>
void typed(int low, const Call& call) {
  low ? call(BFloat16{}) : call(0.0f);
}

}  // namespace

extern "C" {

// y [N, D] = x [N, D] * scales [N] * weight [D], with scales = 1 / sqrt(mean(x²) + epsilon).
void roll_norm(int low, const void* x, const void* weight, void* y, float* scales, int64_t num, int64_t size,
               float epsilon, int threads) {
  typed(low, [&](auto zero) {
    using T = decltype(zero);
    norm(static_cast<const T*>(x), static_cast<const T*>(weight), static_cast<T*>(y), scales, num, size, epsilon,
         threads);
  });
}

// Writes dx [N, D], and the weight's gradient to the first row of dweights [blocks, D].
void roll_norm_backward(int low, const void* x, const void* weight, const float* scales, const void* dy, void* dx,
                        float* dweights, int64_t blocks, int64_t num, int64_t size, int threads) {
  typed(low, [&](auto zero) {
    using T = decltype(zero);
    norm_backward(static_cast<const T*>(x), static_cast<const T*>(weight), scales, static_cast<const T*>(dy),
                  static_cast<T*>(dx), dweights, blocks, num, size, threads);
  });
}

// y = silu(gates) * ups, all with `num` elements.
void roll_gate(int low, const void* gates, const void* ups, void* y, int64_t num, int threads) {
  typed(low, [&](auto zero) {
    using T = decltype(zero);
    gate(static_cast<const T*>(gates), static_cast<const T*>(ups), static_cast<T*>(y), num, threads);
  });
}

// Overwrites gates and ups with their gradients.
void roll_gate_backward(int low, void* gates, void* ups, const void* dy, int64_t num, int threads) {
  typed(low, [&](auto zero) {
    using T = decltype(zero);
    gate_backward(static_cast<T*>(gates), static_cast<T*>(ups), static_cast<const T*>(dy), num, threads);
  });
}

// Rotary embedding of x, `heads` × `tokens` vectors of `size` at the given strides, into y [tokens, heads, size], by cos and
// sin [tokens, size]. If `backward`, x is the gradient of the result and y that of the input.
void roll_rotary(int low, const void* x, const void* cos, const void* sin, void* y, int64_t heads, int64_t tokens,
                 int64_t size, int64_t head_stride, int64_t token_stride, int backward, int threads) {
  typed(low, [&](auto zero) {
    using T = decltype(zero);
    rotary(static_cast<const T*>(x), static_cast<const T*>(cos), static_cast<const T*>(sin), static_cast<T*>(y), heads,
           tokens, size, head_stride, token_stride, backward != 0, threads);
  });
}

// Overwrites logits [N, D] with log(softmax(logits / temperature)); writes entropies [N] unless null.
void roll_log_softmax(float* logits, float* entropies, int64_t num, int64_t size, float temperature, int threads) {
  log_softmax(logits, entropies, num, size, temperature, threads);
}

// Overwrites logp [N, D] with the logits' gradient; slopes and entropies [N] are null without an entropy gradient.
void roll_logits_gradient(float* logp, const int64_t* targets, const float* grads, const float* slopes,
                          const float* entropies, int64_t num, int64_t size, int threads) {
  logits_gradient(logp, targets, grads, slopes, entropies, num, size, threads);
}

}  // extern "C"
