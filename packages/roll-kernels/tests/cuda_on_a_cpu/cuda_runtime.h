// Enough of CUDA to compute a `.cu` file on a CPU, compiled as C++20: blocks one after the other, each thread of a
// block as a thread of the host. It shows whether the numbers are right and whether barriers are where they must be; of
// a GPU it shows nothing.
#pragma once

#include <barrier>
#include <cmath>
#include <cstring>
#include <optional>
#include <thread>
#include <vector>

#define __global__
#define __device__
#define __shared__ static  // one block at a time

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1 };
using cudaStream_t = void*;

struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes = 0;
  cudaStream_t stream = nullptr;
};

inline thread_local dim3 threadIdx, blockIdx;
inline std::optional<std::barrier<>> block_barrier;

inline void __syncthreads() { block_barrier->arrive_and_wait(); }

template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...), Arguments... arguments) {
  for (unsigned block = 0; block < config->gridDim.x; ++block) {
    block_barrier.emplace(config->blockDim.x);
    std::vector<std::thread> threads;
    for (unsigned thread = 0; thread < config->blockDim.x; ++thread) {
      threads.emplace_back([=] {
        threadIdx.x = thread;
        blockIdx.x = block;
        kernel(arguments...);
      });
    }
    for (auto& each : threads) each.join();
  }
  return cudaSuccess;
}
