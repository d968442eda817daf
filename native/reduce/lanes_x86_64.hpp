// AVX2 code with F16C, chosen at run time, where the compiler's own vectors are too slow: the 16-bit floats.

#pragma once

#include <cpuid.h>
#include <immintrin.h>

#include "reduce/operations.hpp"

#define SEALRING_HAS_LANES 1
#define SEALRING_LANES_TARGET __attribute__((target("avx2,f16c")))

namespace sealring::lanes {

inline bool available() {
  static const bool found = [] {
    __builtin_cpu_init();
    // Not every compiler knows the name "f16c" here, so that bit is read by hand.
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    return __builtin_cpu_supports("avx2") && __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 &&
           (ecx & bit_F16C) != 0;
  }();
  return found;
}

// Sixteen 16-bit floats as float32, in whichever order suits the type.
struct Wide {
  __m256 first, second;
};
constexpr std::size_t kBytes = 32;

SEALRING_LANES_TARGET SEALRING_INLINE __m256i rounded_to_upper_half(__m256 value) {
  const __m256i bits = _mm256_castps_si256(value);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  return _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
}

template <class T>
SEALRING_LANES_TARGET SEALRING_INLINE Wide open(const std::byte* from) {
  if constexpr (std::same_as<T, Float16>) {
    const auto* packed = reinterpret_cast<const __m128i*>(from);
    return {_mm256_cvtph_ps(_mm_loadu_si128(packed)), _mm256_cvtph_ps(_mm_loadu_si128(packed + 1))};
  } else {
    // Splits even and odd elements: the bits of the odd ones are already where float32 has them.
    const __m256i packed = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    const __m256i upper = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(packed, 16)),
            _mm256_castsi256_ps(_mm256_and_si256(packed, upper))};
  }
}

template <class T>
SEALRING_LANES_TARGET SEALRING_INLINE void close(std::byte* to, Wide value) {
  if constexpr (std::same_as<T, Float16>) {
    auto* packed = reinterpret_cast<__m128i*>(to);
    _mm_storeu_si128(packed, _mm256_cvtps_ph(value.first, _MM_FROUND_TO_NEAREST_INT));
    _mm_storeu_si128(packed + 1, _mm256_cvtps_ph(value.second, _MM_FROUND_TO_NEAREST_INT));
  } else {
    // A NaN made from bfloat16 has an empty lower half (see clean_nan): rounding leaves it alone.
    const __m256i even = _mm256_srli_epi32(rounded_to_upper_half(value.first), 16);
    const __m256i odd = rounded_to_upper_half(value.second);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_blend_epi16(even, odd, 0xaa));
  }
}

SEALRING_LANES_TARGET SEALRING_INLINE Wide apply(Sum, Wide a, Wide b) {
  return {_mm256_add_ps(a.first, b.first), _mm256_add_ps(a.second, b.second)};
}

SEALRING_LANES_TARGET SEALRING_INLINE Wide apply(Product, Wide a, Wide b) {
  return {_mm256_mul_ps(a.first, b.first), _mm256_mul_ps(a.second, b.second)};
}

// MINPS and MAXPS return their second operand for two zeros and for a NaN. Taking both orders of the operands
// and joining the bits orders the zeros; if either operand is NaN, the sum is taken instead.
SEALRING_LANES_TARGET SEALRING_INLINE __m256 or_nan(__m256 ordered, __m256 a, __m256 b) {
  return _mm256_blendv_ps(ordered, _mm256_add_ps(a, b), _mm256_cmp_ps(a, b, _CMP_UNORD_Q));
}

SEALRING_LANES_TARGET SEALRING_INLINE __m256 lesser(__m256 a, __m256 b) {
  return or_nan(_mm256_or_ps(_mm256_min_ps(a, b), _mm256_min_ps(b, a)), a, b);
}

SEALRING_LANES_TARGET SEALRING_INLINE __m256 greater(__m256 a, __m256 b) {
  return or_nan(_mm256_and_ps(_mm256_max_ps(a, b), _mm256_max_ps(b, a)), a, b);
}

SEALRING_LANES_TARGET SEALRING_INLINE Wide apply(Min, Wide a, Wide b) {
  return {lesser(a.first, b.first), lesser(a.second, b.second)};
}

SEALRING_LANES_TARGET SEALRING_INLINE Wide apply(Max, Wide a, Wide b) {
  return {greater(a.first, b.first), greater(a.second, b.second)};
}

SEALRING_LANES_TARGET SEALRING_INLINE Wide apply(Divide<float> by, Wide a) {
  const __m256 divisor = _mm256_set1_ps(by.divisor);
  return {_mm256_div_ps(a.first, divisor), _mm256_div_ps(a.second, divisor)};
}

SEALRING_LANES_TARGET SEALRING_INLINE Wide apply(Scale<float> by, Wide a) {
  const __m256 factor = _mm256_set1_ps(by.factor);
  return {_mm256_mul_ps(a.first, factor), _mm256_mul_ps(a.second, factor)};
}

}  // namespace sealring::lanes
