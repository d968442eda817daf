// A reference for native/reduce/reduce.hpp that computes the same results by slow and different means:
// integers in 128 bits, 16-bit floats by ldexp and nearbyint, nothing vectorised, volatile so that nothing is
// fused.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

#include "reduce/reduce.hpp"

namespace sealring::reference {

enum class Family { floating, integer, boolean, complex };

inline Family family(DType dtype) {
  if (dtype <= DType::float64) return Family::floating;
  if (dtype == DType::boolean) return Family::boolean;
  return dtype >= DType::complex64 ? Family::complex : Family::integer;
}

inline bool is_signed(DType dtype) { return dtype >= DType::int8 && dtype <= DType::int64; }

// The layout of a 16-bit float: 10 fraction bits and bias 15, or 7 and 127.
struct Layout {
  int fraction;
  int bias;
};

inline Layout layout(DType dtype) {
  return dtype == DType::float16 ? Layout{10, 15} : Layout{7, 127};
}

inline double decode16(DType dtype, std::uint16_t bits) {
  const auto [fraction, bias] = layout(dtype);
  const int exponent = (bits & 0x7fff) >> fraction;
  const int digits = bits & ((1 << fraction) - 1);
  double value = 0;
  if (exponent == 2 * bias + 1) {
    value = digits != 0 ? std::numeric_limits<double>::quiet_NaN()
                        : std::numeric_limits<double>::infinity();
  } else if (exponent == 0) {
    value = std::ldexp(digits, 1 - bias - fraction);
  } else {
    value = std::ldexp(digits + (1 << fraction), exponent - bias - fraction);
  }
  return (bits & 0x8000) != 0 ? -value : value;
}

// Rounds to nearest even by counting units in the last place of the result.
inline std::uint16_t encode16(DType dtype, double value) {
  const auto [fraction, bias] = layout(dtype);
  const int sign = std::signbit(value) ? 0x8000 : 0;
  const int infinity = (2 * bias + 1) << fraction;
  if (std::isnan(value)) return static_cast<std::uint16_t>(sign | infinity | 1 << (fraction - 1));
  value = std::fabs(value);
  if (std::isinf(value)) return static_cast<std::uint16_t>(sign | infinity);
  if (value == 0) return static_cast<std::uint16_t>(sign);
  const int exponent = std::max(std::ilogb(value), 1 - bias);
  const double units = std::nearbyint(std::ldexp(value, fraction - exponent));
  // A carry out of the fraction correctly goes into the exponent; past the largest exponent is infinity.
  const double bits = units + std::ldexp(exponent + bias - 1, fraction);
  return static_cast<std::uint16_t>(sign | static_cast<int>(std::min<double>(bits, infinity)));
}

template <class T>
T float_pair(ReduceKind kind, T left, T right) {
  volatile T a = left, b = right;
  if (kind == ReduceKind::product) return a * b;
  if (kind != ReduceKind::min && kind != ReduceKind::max) return a + b;
  if (std::isnan(left) || std::isnan(right)) return std::numeric_limits<T>::quiet_NaN();
  const bool min = kind == ReduceKind::min;
  if (left == right) return std::signbit(left) == min ? left : right;
  return (left < right) == min ? left : right;
}

// Applies a function to a float element of any width, as a float or double, and stores the result.
template <class T, class Function>
void on_float(DType dtype, std::byte* at, Function function) {
  if (item_bytes(dtype) == 2) {
    std::uint16_t bits;
    std::memcpy(&bits, at, 2);
    bits = encode16(dtype, function(static_cast<T>(decode16(dtype, bits))));
    std::memcpy(at, &bits, 2);
  } else {
    T value;
    std::memcpy(&value, at, sizeof value);
    value = function(value);
    std::memcpy(at, &value, sizeof value);
  }
}

template <class T>
T float_at(DType dtype, const std::byte* at) {
  T value{};
  std::byte copy[8];
  std::memcpy(copy, at, std::min<std::size_t>(item_bytes(dtype), sizeof copy));
  on_float<T>(dtype, copy, [&](T seen) { return value = seen; });
  return value;
}

using Wide = __int128;
using UnsignedWide = unsigned __int128;

inline Wide integer_at(DType dtype, const std::byte* at) {
  std::uint64_t raw = 0;
  std::memcpy(&raw, at, item_bytes(dtype));  // little endian, as on every supported platform
  const int unused = 64 - 8 * static_cast<int>(item_bytes(dtype));
  return is_signed(dtype) ? static_cast<Wide>(static_cast<std::int64_t>(raw << unused) >> unused)
                          : static_cast<Wide>(raw);
}

inline void put_integer(DType dtype, std::byte* at, Wide value) {
  const auto raw = static_cast<std::uint64_t>(static_cast<UnsignedWide>(value));
  std::memcpy(at, &raw, item_bytes(dtype));
}

inline Wide integer_pair(ReduceKind kind, Wide a, Wide b) {
  switch (kind) {
    case ReduceKind::product:
      return static_cast<Wide>(static_cast<UnsignedWide>(a) * static_cast<UnsignedWide>(b));
    case ReduceKind::min:
      return a < b ? a : b;
    case ReduceKind::max:
      return a < b ? b : a;
    case ReduceKind::band:
      return a & b;
    case ReduceKind::bor:
      return a | b;
    case ReduceKind::bxor:
      return a ^ b;
    default:
      return a + b;
  }
}

inline bool boolean_pair(ReduceKind kind, bool a, bool b) {
  switch (kind) {
    case ReduceKind::product:
    case ReduceKind::min:
    case ReduceKind::band:
      return a && b;
    case ReduceKind::bxor:
      return a != b;
    default:
      return a || b;
  }
}

template <class T>
void complex_pair(ReduceKind kind, std::byte* dst, const std::byte* src) {
  T x[2], y[2];
  std::memcpy(x, dst, sizeof x);
  std::memcpy(y, src, sizeof y);
  volatile T a = x[0], b = x[1], c = y[0], d = y[1];
  if (kind == ReduceKind::product) {
    volatile T ac = a * c, bd = b * d, ad = a * d, bc = b * c;
    x[0] = ac - bd;
    x[1] = ad + bc;
  } else {
    x[0] = a + c;
    x[1] = b + d;
  }
  std::memcpy(dst, x, sizeof x);
}

// One element: dst = dst op src.
inline void pair(DType dtype, ReduceKind kind, std::byte* dst, const std::byte* src) {
  switch (family(dtype)) {
    case Family::floating:
      if (dtype == DType::float64) {
        const double b = float_at<double>(dtype, src);
        on_float<double>(dtype, dst, [&](double a) { return float_pair(kind, a, b); });
      } else {
        const float b = float_at<float>(dtype, src);
        on_float<float>(dtype, dst, [&](float a) { return float_pair(kind, a, b); });
      }
      return;
    case Family::integer:
      return put_integer(dtype, dst,
                         integer_pair(kind, integer_at(dtype, dst), integer_at(dtype, src)));
    case Family::boolean:
      *dst = std::byte{boolean_pair(kind, *dst != std::byte{0}, *src != std::byte{0})};
      return;
    case Family::complex:
      return dtype == DType::complex64 ? complex_pair<float>(kind, dst, src)
                                       : complex_pair<double>(kind, dst, src);
  }
}

// The type of an element's parts: a complex element has two floats, any other is its own part.
inline DType part(DType dtype) {
  if (dtype == DType::complex64) return DType::float32;
  return dtype == DType::complex128 ? DType::float64 : dtype;
}

inline void average(DType dtype, std::byte* at, std::uint32_t divisor) {
  if (family(dtype) == Family::integer) {
    put_integer(dtype, at, integer_at(dtype, at) / static_cast<Wide>(divisor));
  } else if (dtype == DType::float64) {
    volatile double by = divisor;
    on_float<double>(dtype, at, [&](double a) { return a / by; });
  } else if (dtype != DType::boolean) {
    volatile float by = static_cast<float>(divisor);
    on_float<float>(dtype, at, [&](float a) { return a / by; });
  }
}

// For whole factors within int64 only; conversions at the limits have their own test.
inline void premultiply(DType dtype, std::byte* at, double factor) {
  if (family(dtype) == Family::integer) {
    const Wide by = static_cast<std::int64_t>(factor);
    put_integer(dtype, at, integer_pair(ReduceKind::product, integer_at(dtype, at), by));
  } else if (dtype == DType::boolean) {
    if (factor == 0) *at = std::byte{0};
  } else if (dtype == DType::float64) {
    volatile double by = factor;
    on_float<double>(dtype, at, [&](double a) { return a * by; });
  } else {
    volatile float by = static_cast<float>(factor);
    on_float<float>(dtype, at, [&](float a) { return a * by; });
  }
}

// Whether both have the same bits, or both are NaN (the hardware chooses the kind). `part_type` is no complex
// type.
inline bool same(DType part_type, const std::byte* a, const std::byte* b) {
  if (std::memcmp(a, b, item_bytes(part_type)) == 0) return true;
  if (family(part_type) != Family::floating) return false;
  if (part_type == DType::float64) {
    return std::isnan(float_at<double>(part_type, a)) && std::isnan(float_at<double>(part_type, b));
  }
  return std::isnan(float_at<float>(part_type, a)) && std::isnan(float_at<float>(part_type, b));
}

}  // namespace sealring::reference
