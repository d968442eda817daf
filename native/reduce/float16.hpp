// The two 16-bit float types: how they become float32 and how float32 rounds back to them.
//
// These scalar functions handle the last few elements of a chunk, or all of them on a processor without the
// vectors of lanes_*.hpp. Both agree to the bit with the hardware's conversions (FCVT on aarch64, F16C on
// x86_64).

#pragma once

#include <bit>
#include <cstdint>

#define SEALRING_INLINE __attribute__((always_inline)) inline

namespace sealring {

struct Float16 {
  std::uint16_t bits;
};

struct BFloat16 {
  std::uint16_t bits;
};

SEALRING_INLINE float widen(Float16 value) {
  // Moves exponent and fraction into place, then corrects the exponent bias by 127 - 15 = 112.
  constexpr std::uint32_t kRebias = 112u << 23;
  const std::uint32_t wide = value.bits;
  const std::uint32_t sign = (wide & 0x8000u) << 16;
  const std::uint32_t magnitude = (wide & 0x7fffu) << 13;
  const std::uint32_t normal = magnitude + kRebias;
  const std::uint32_t special = magnitude | 0x7f800000u;
  const std::uint32_t quiet = magnitude > (0x7c00u << 13) ? 0x00400000u : 0u;
  // A subnormal is fraction * 2^-24: give it the leading one of 2^-14, then take that away again.
  const float lifted = std::bit_cast<float>(magnitude + kRebias + (1u << 23));
  const std::uint32_t subnormal = std::bit_cast<std::uint32_t>(lifted - 0x1p-14f);
  std::uint32_t bits = magnitude < (1u << 23) ? subnormal : normal;
  bits = magnitude >= (0x7c00u << 13) ? special | quiet : bits;
  return std::bit_cast<float>(bits | sign);
}

SEALRING_INLINE float widen(BFloat16 value) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(value.bits) << 16);
}

template <class Narrow>
Narrow narrow(float value);

template <>
SEALRING_INLINE Float16 narrow<Float16>(float value) {
  constexpr std::uint32_t kRebias = 112u << 23;
  constexpr std::uint32_t kOverflow = 0x477ff000u;  // 65520: halfway from the largest to the next
  constexpr std::uint32_t kSmallestNormal = 113u << 23;  // 2^-14
  const std::uint32_t wide = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = (wide >> 16) & 0x8000u;
  const std::uint32_t magnitude = wide & 0x7fffffffu;
  // Adding half of the last kept bit, less one when that bit is even, rounds to nearest even.
  const std::uint32_t normal = (magnitude - kRebias + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  // One unit in the last place of 0.5 is 2^-24, the smallest subnormal: the addition itself rounds.
  const float aligned = std::bit_cast<float>(magnitude) + 0.5f;
  const std::uint32_t subnormal = std::bit_cast<std::uint32_t>(aligned) - 0x3f000000u;
  const std::uint32_t nan = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
  std::uint32_t bits = magnitude < kSmallestNormal ? subnormal : normal;
  bits = magnitude >= kOverflow ? 0x7c00u : bits;
  bits = magnitude > 0x7f800000u ? nan : bits;
  return Float16{static_cast<std::uint16_t>(bits | sign)};
}

template <>
SEALRING_INLINE BFloat16 narrow<BFloat16>(float value) {
  const std::uint32_t wide = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t rounded = (wide + 0x7fffu + ((wide >> 16) & 1u)) >> 16;
  // A NaN is not rounded: the carry could turn it into infinity or flip its sign.
  const std::uint32_t nan = (wide >> 16) | 0x40u;
  const bool is_nan = (wide & 0x7fffffffu) > 0x7f800000u;
  return BFloat16{static_cast<std::uint16_t>(is_nan ? nan : rounded)};
}

}  // namespace sealring
