// NEON code where the compiler's own vectors are too slow: the 16-bit floats, and min and max of floats.

#pragma once

#include <arm_neon.h>
#include <sys/auxv.h>

#include "reduce/operations.hpp"

#define SEALRING_HAS_LANES 1
#define SEALRING_LANES_TARGET

namespace sealring::lanes {

SEALRING_INLINE bool available() { return true; }  // NEON is part of every aarch64

// Eight 16-bit floats as float32, in whichever order suits the type.
struct Wide {
  float32x4_t first, second;
};
constexpr std::size_t kBytes = 16;

SEALRING_INLINE uint8x16_t load_bytes(const std::byte* from) {
  return vld1q_u8(reinterpret_cast<const std::uint8_t*>(from));
}

SEALRING_INLINE void store_bytes(std::byte* to, uint8x16_t value) {
  vst1q_u8(reinterpret_cast<std::uint8_t*>(to), value);
}

template <class T>
SEALRING_INLINE Wide open(const std::byte* from) {
  if constexpr (std::same_as<T, Float16>) {
    const float16x8_t packed = vreinterpretq_f16_u8(load_bytes(from));
    return {vcvt_f32_f16(vget_low_f16(packed)), vcvt_high_f32_f16(packed)};
  } else {
    // Splits even and odd elements: the bits of the odd ones are already where float32 has them.
    const uint32x4_t packed = vreinterpretq_u32_u8(load_bytes(from));
    return {vreinterpretq_f32_u32(vshlq_n_u32(packed, 16)),
            vreinterpretq_f32_u32(vandq_u32(packed, vdupq_n_u32(0xffff0000u)))};
  }
}

template <class T>
SEALRING_INLINE void close(std::byte* to, Wide value) {
  if constexpr (std::same_as<T, Float16>) {
    const float16x8_t packed = vcvt_high_f16_f32(vcvt_f16_f32(value.first), value.second);
    store_bytes(to, vreinterpretq_u8_f16(packed));
  } else {
    // Round up when the dropped half is above a tie, or on one while the kept half is odd. A NaN
    // made from bfloat16 has an empty dropped half (see clean_nan), so it stays as it is.
    const uint16x8_t even = vreinterpretq_u16_f32(value.first);
    const uint16x8_t odd = vreinterpretq_u16_f32(value.second);
    const uint16x8_t kept = vtrn2q_u16(even, odd);
    const uint16x8_t dropped = vtrn1q_u16(even, odd);
    const uint16x8_t sticky = vorrq_u16(dropped, vandq_u16(kept, vdupq_n_u16(1)));
    const uint16x8_t up = vcgtq_u16(sticky, vdupq_n_u16(0x8000));
    store_bytes(to, vreinterpretq_u8_u16(vsubq_u16(kept, up)));  // up is 0 or -1
  }
}

SEALRING_INLINE Wide apply(Sum, Wide a, Wide b) {
  return {vaddq_f32(a.first, b.first), vaddq_f32(a.second, b.second)};
}

SEALRING_INLINE Wide apply(Product, Wide a, Wide b) {
  return {vmulq_f32(a.first, b.first), vmulq_f32(a.second, b.second)};
}

// FMIN and FMAX propagate NaN and order the zeros by themselves.
SEALRING_INLINE Wide apply(Min, Wide a, Wide b) {
  return {vminq_f32(a.first, b.first), vminq_f32(a.second, b.second)};
}

SEALRING_INLINE Wide apply(Max, Wide a, Wide b) {
  return {vmaxq_f32(a.first, b.first), vmaxq_f32(a.second, b.second)};
}

SEALRING_INLINE Wide apply(Divide<float> by, Wide a) {
  const float32x4_t divisor = vdupq_n_f32(by.divisor);
  return {vdivq_f32(a.first, divisor), vdivq_f32(a.second, divisor)};
}

SEALRING_INLINE Wide apply(Scale<float> by, Wide a) {
  const float32x4_t factor = vdupq_n_f32(by.factor);
  return {vmulq_f32(a.first, factor), vmulq_f32(a.second, factor)};
}

template <class T, class Op>
  requires std::floating_point<T> && (std::same_as<Op, Min> || std::same_as<Op, Max>)
struct Step<T, Op> {
  static constexpr std::size_t kBytes = 16;
  static SEALRING_INLINE void run(std::byte* dst, const std::byte* src) {
    const uint8x16_t left = load_bytes(dst), right = load_bytes(src);
    constexpr bool min = std::same_as<Op, Min>;
    if constexpr (sizeof(T) == 4) {
      const auto a = vreinterpretq_f32_u8(left), b = vreinterpretq_f32_u8(right);
      store_bytes(dst, vreinterpretq_u8_f32(min ? vminq_f32(a, b) : vmaxq_f32(a, b)));
    } else {
      const auto a = vreinterpretq_f64_u8(left), b = vreinterpretq_f64_u8(right);
      store_bytes(dst, vreinterpretq_u8_f64(min ? vminq_f64(a, b) : vmaxq_f64(a, b)));
    }
  }
};

}  // namespace sealring::lanes

// From ARMv8.2 on, most processors compute in float16 directly, several times faster than by converting. One
// float16 operation gives the same bits as a float32 operation rounded once: float32's 24 digits are twice
// float16's 11 digits plus two, enough for rounding twice to equal rounding once. (An average divides by a
// number that may not be a float16, so it still converts.)
#if !defined(__clang__) || __clang_major__ >= 16
#define SEALRING_HAS_NATIVE_FLOAT16 1
#define SEALRING_FLOAT16_TARGET __attribute__((target("arch=armv8.2-a+fp16")))

namespace sealring::native_float16 {

inline bool available() {
  constexpr unsigned long kAdvancedSimdHalfPrecision = 1ul << 10;  // HWCAP_ASIMDHP
  return (getauxval(AT_HWCAP) & kAdvancedSimdHalfPrecision) != 0;
}

SEALRING_FLOAT16_TARGET SEALRING_INLINE float16x8_t apply(Sum, float16x8_t a, float16x8_t b) {
  return vaddq_f16(a, b);
}

SEALRING_FLOAT16_TARGET SEALRING_INLINE float16x8_t apply(Product, float16x8_t a, float16x8_t b) {
  return vmulq_f16(a, b);
}

SEALRING_FLOAT16_TARGET SEALRING_INLINE float16x8_t apply(Min, float16x8_t a, float16x8_t b) {
  return vminq_f16(a, b);
}

SEALRING_FLOAT16_TARGET SEALRING_INLINE float16x8_t apply(Max, float16x8_t a, float16x8_t b) {
  return vmaxq_f16(a, b);
}

template <class Op>
SEALRING_FLOAT16_TARGET SEALRING_INLINE void step(std::byte* dst, const std::byte* src) {
  const float16x8_t a = vreinterpretq_f16_u8(lanes::load_bytes(dst));
  const float16x8_t b = vreinterpretq_f16_u8(lanes::load_bytes(src));
  lanes::store_bytes(dst, vreinterpretq_u8_f16(apply(Op{}, a, b)));
}

}  // namespace sealring::native_float16
#endif
