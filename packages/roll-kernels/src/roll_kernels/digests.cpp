// Copies chunks of weights and computes their digests in one pass. `roll_core.spec.weights` defines digests: the XXH3
// 128-bit hash (seed 0) of each chunk, read back from the copy's target.
//
//     piece n:      source --> target --> hash       a piece is 2 KiB, so the hash reads it from the first-level cache
//     piece n + 1:  source --> cache                 prefetched while piece n is hashed
//
// The processor thus hashes while memory transfers are in progress.
//
// XXH3 is implemented from its specification (xxHash, doc/xxhash_spec.md) for inputs of more than 240 bytes. Callers
// hash shorter inputs. C functions on raw memory, so that the file compiles in seconds.

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "digests are of little-endian bytes"
#endif

namespace {

constexpr size_t STRIPE = 64;
constexpr size_t BLOCK = 1024;
constexpr size_t PIECE = 2 * BLOCK;
constexpr size_t SECRET = 192;
constexpr size_t LEAF = 16;

constexpr uint64_t PRIME32_1 = 0x9E3779B1, PRIME32_2 = 0x85EBCA77, PRIME32_3 = 0xC2B2AE3D;
constexpr uint64_t PRIME64_1 = 0x9E3779B185EBCA87, PRIME64_2 = 0xC2B2AE3D27D4EB4F, PRIME64_3 = 0x165667B19E3779F9;
constexpr uint64_t PRIME64_4 = 0x85EBCA77C2B2AE63, PRIME64_5 = 0x27D4EB2F165667C5, PRIME_MX = 0x165667919E3779F9;

alignas(64) const uint8_t secret[SECRET] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

typedef uint64_t Lanes __attribute__((vector_size(STRIPE)));  // the compiler splits it for smaller registers

inline Lanes load(const uint8_t* from) {
  Lanes found;
  std::memcpy(&found, from, STRIPE);
  return found;
}

inline uint64_t word(const uint8_t* from) {
  uint64_t found;
  std::memcpy(&found, from, sizeof found);
  return found;
}

inline Lanes neighbours(Lanes value) {  // swaps lanes 0 and 1, 2 and 3, and so on
#if defined(__clang__)
  return __builtin_shufflevector(value, value, 1, 0, 3, 2, 5, 4, 7, 6);
#else
  return __builtin_shuffle(value, Lanes{1, 0, 3, 2, 5, 4, 7, 6});
#endif
}

inline Lanes product_of_halves(Lanes value) {  // lower times upper 32 bits of each lane
#if defined(__AVX512F__)
  return (Lanes)_mm512_mul_epu32((__m512i)value, (__m512i)(value >> 32));
#elif defined(__AVX2__)
  __m256i half[2];
  std::memcpy(half, &value, STRIPE);
  for (__m256i& each : half) each = _mm256_mul_epu32(each, _mm256_srli_epi64(each, 32));
  std::memcpy(&value, half, STRIPE);
  return value;
#else
  return (value & 0xffffffff) * (value >> 32);
#endif
}

inline Lanes accumulate(Lanes sums, const uint8_t* stripe, size_t at) {
  const Lanes value = load(stripe);
  return sums + neighbours(value) + product_of_halves(value ^ load(secret + at));
}

inline Lanes scramble(Lanes sums) {
  return (sums ^ (sums >> 47) ^ load(secret + SECRET - STRIPE)) * PRIME32_1;
}

inline uint64_t merge(Lanes sums, size_t at, uint64_t start) {
  for (int pair = 0; pair < 4; ++pair) {
    const uint64_t left = sums[2 * pair] ^ word(secret + at + 16 * pair);
    const uint64_t right = sums[2 * pair + 1] ^ word(secret + at + 16 * pair + 8);
    const unsigned __int128 both = static_cast<unsigned __int128>(left) * right;
    start += static_cast<uint64_t>(both) ^ static_cast<uint64_t>(both >> 64);
  }
  start = (start ^ (start >> 37)) * PRIME_MX;
  return start ^ (start >> 32);
}

inline void store_big_endian(uint8_t* to, uint64_t value) {
  value = __builtin_bswap64(value);
  std::memcpy(to, &value, sizeof value);
}

// With ERMS, the processor's own copy instruction does not read the target's cache lines before it overwrites them.
bool copies_itself() {
#if defined(__x86_64__)
  unsigned a, b, c, d;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b >> 9 & 1);
#else
  return false;
#endif
}

const bool COPIES_ITSELF = copies_itself();

inline void copy(uint8_t* target, const uint8_t* source, size_t size) {
#if defined(__x86_64__)
  if (COPIES_ITSELF) {
    asm volatile("rep movsb" : "+D"(target), "+S"(source), "+c"(size) : : "memory");
    return;
  }
#endif
  std::memcpy(target, source, size);
}

// Adds a block to the sums, while `soon` is prefetched into the cache.
inline Lanes block(Lanes sums, const uint8_t* from, const uint8_t* soon) {
  for (size_t at = 0; at < BLOCK; at += STRIPE) {
    __builtin_prefetch(soon + at);
    sums = accumulate(sums, from + at, at / 8);
  }
  return scramble(sums);
}

// Copies `size` bytes, more than 240, and hashes the content of `target` afterwards.
void leaf(uint8_t* target, const uint8_t* source, size_t size, uint8_t* found) {
  Lanes sums = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1};
  const size_t blocks = (size - 1) / BLOCK;  // the last, full or not, is hashed differently
  size_t copied = 0;
  for (size_t at = 0; at < blocks * BLOCK; at += BLOCK) {
    if (at == copied) {
      const size_t piece = size - at < PIECE ? size - at : PIECE;
      copy(target + at, source + at, piece);
      copied += piece;
    }
    sums = block(sums, target + at, source + at + PIECE);
  }
  copy(target + copied, source + copied, size - copied);
  const uint8_t* last = target + blocks * BLOCK;
  for (size_t at = 0; at + STRIPE < size - blocks * BLOCK; at += STRIPE) sums = accumulate(sums, last + at, at / 8);
  sums = accumulate(sums, target + size - STRIPE, SECRET - STRIPE - 7);
  store_big_endian(found, merge(sums, SECRET - STRIPE - 11, ~(size * PRIME64_2)));
  store_big_endian(found + 8, merge(sums, 11, size * PRIME64_1));
}

}  // namespace

// Copies `size` bytes, and writes the 16-byte hash of each `chunk` of them to `leaves`, in order. The last chunk may be
// shorter, but needs at least 241 bytes. The two memories do not overlap.
extern "C" void roll_copy_leaves(uint8_t* target, const uint8_t* source, size_t size, size_t chunk, uint8_t* leaves) {
  for (size_t at = 0; at < size; at += chunk, leaves += LEAF) {
    leaf(target + at, source + at, size - at < chunk ? size - at : chunk, leaves);
  }
}
