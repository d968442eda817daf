// The arithmetic of each reduction on one element, written so that loops over it vectorise.

#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "reduce/float16.hpp"

#ifdef __FAST_MATH__
#error "sealring's sums are defined to the bit: compile without -ffast-math"
#endif

namespace sealring {

// The type an element is computed in: float32 for the 16-bit floats, otherwise its own.
template <class T>
struct Element {
  using Math = T;
  static SEALRING_INLINE T open(T value) { return value; }
  static SEALRING_INLINE T close(T value) { return value; }
};

template <class T>
concept Narrow16 = std::same_as<T, Float16> || std::same_as<T, BFloat16>;

template <Narrow16 T>
struct Element<T> {
  using Math = float;
  static SEALRING_INLINE float open(T value) { return widen(value); }
  static SEALRING_INLINE T close(float value) { return narrow<T>(value); }
};

// Unsigned and at least as wide as int: uint16 * uint16 would be promoted to int and overflow it.
template <std::integral T>
using Wrapping = std::conditional_t<sizeof(T) == 8, std::uint64_t, std::uint32_t>;

template <std::floating_point T>
using BitsOf = std::conditional_t<sizeof(T) == 8, std::uint64_t, std::uint32_t>;

struct Sum {
  template <class T>
  static SEALRING_INLINE T apply(T a, T b) {
    if constexpr (std::integral<T>) {
      return static_cast<T>(static_cast<Wrapping<T>>(a) + static_cast<Wrapping<T>>(b));
    } else {
      return a + b;
    }
  }
};

struct Product {
  template <class T>
  static SEALRING_INLINE T apply(T a, T b) {
    if constexpr (std::integral<T>) {
      return static_cast<T>(static_cast<Wrapping<T>>(a) * static_cast<Wrapping<T>>(b));
    } else {
      return a * b;
    }
  }
};

struct Min {
  template <class T>
  static SEALRING_INLINE T apply(T a, T b) {
    if constexpr (std::integral<T>) {
      return b < a ? b : a;
    } else {
      // Equal values differ at most in the sign of zero: the union of their bits is -0.
      using Bits = BitsOf<T>;
      const T same = std::bit_cast<T>(std::bit_cast<Bits>(a) | std::bit_cast<Bits>(b));
      const T lesser = a < b ? a : b;  // b when either is NaN
      const T ordered = a == b ? same : lesser;
      return a != a ? a : ordered;
    }
  }
};

struct Max {
  template <class T>
  static SEALRING_INLINE T apply(T a, T b) {
    if constexpr (std::integral<T>) {
      return a < b ? b : a;
    } else {
      using Bits = BitsOf<T>;
      const T same = std::bit_cast<T>(std::bit_cast<Bits>(a) & std::bit_cast<Bits>(b));
      const T greater = a > b ? a : b;
      const T ordered = a == b ? same : greater;
      return a != a ? a : ordered;
    }
  }
};

struct BitAnd {
  template <std::integral T>
  static SEALRING_INLINE T apply(T a, T b) {
    return a & b;
  }
};

struct BitOr {
  template <std::integral T>
  static SEALRING_INLINE T apply(T a, T b) {
    return a | b;
  }
};

struct BitXor {
  template <std::integral T>
  static SEALRING_INLINE T apply(T a, T b) {
    return a ^ b;
  }
};

struct LogicalOr {
  static SEALRING_INLINE std::uint8_t apply(std::uint8_t a, std::uint8_t b) { return (a | b) != 0; }
};

struct LogicalAnd {
  static SEALRING_INLINE std::uint8_t apply(std::uint8_t a, std::uint8_t b) {
    return (a != 0) & (b != 0);
  }
};

struct LogicalXor {
  static SEALRING_INLINE std::uint8_t apply(std::uint8_t a, std::uint8_t b) {
    return (a != 0) ^ (b != 0);
  }
};

template <class T>
struct Divide {
  T divisor;
  SEALRING_INLINE T apply(T value) const { return value / divisor; }
};

template <std::integral T>
struct Divide<T> {
  // Integers of up to 32 bits divide as floats, which vectorise. Truncation is exact: a quotient
  // a/d that is no integer lies at least 1/d away from one, and rounding moves it by less as long
  // as a fits in the fraction (16 bits in float, 32 in double).
  using Real = std::conditional_t<sizeof(T) <= 2, float, double>;
  using Work = std::conditional_t<
      sizeof(T) == 8, std::conditional_t<std::is_signed_v<T>, std::int64_t, std::uint64_t>, Real>;
  Work divisor;
  SEALRING_INLINE T apply(T value) const {
    return static_cast<T>(static_cast<Work>(value) / divisor);
  }
};

template <class T>
struct Scale {
  T factor;
  SEALRING_INLINE T apply(T value) const { return Product::apply(value, factor); }
};

// Every NaN that float32 arithmetic makes out of bfloat16 inputs is the default NaN or one of the inputs, so
// its lower half is empty. A NaN factor from outside is replaced by such a NaN.
SEALRING_INLINE float clean_nan(float value) { return value != value ? __builtin_nanf("") : value; }

// Uses memcpy, because the bytes may belong to a tensor of any type and start at any address.
template <class T>
SEALRING_INLINE T load(const std::byte* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

template <class T>
SEALRING_INLINE void store(std::byte* to, T value) {
  std::memcpy(to, &value, sizeof value);
}

// dst = dst op src on one vector, if it is written by hand; kBytes 0 means that it is not.
namespace lanes {
template <class T, class Op>
struct Step {
  static constexpr std::size_t kBytes = 0;
};
}  // namespace lanes

}  // namespace sealring
