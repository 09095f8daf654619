// Shared code of CPU kernels: bfloat16 in memory, and functions written so that compilers vectorise them.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

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
inline BFloat16 rounded<BFloat16>(float x) {  // to nearest, ties to even
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const uint32_t up = bits + 0x7fff + ((bits >> 16) & 1);
  const bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
  return {static_cast<uint16_t>((is_nan ? bits | 0x400000 : up) >> 16)};
}

// e^x within two ulp; 0 below the smallest normal number, NaN for NaN. Written out so that compilers vectorise it.
inline float exponential(float x) {
  const float given = x;
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
  return given < -87.3f ? 0.0f : p * scale;
}

// 1 / (1 + e^-x) within a few ulp; NaN for NaN.
inline float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

}  // namespace
