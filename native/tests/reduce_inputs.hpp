// Inputs for tests of the reductions: names, every reducible pair, and buffers full of corner cases.

#pragma once

#include <cstring>
#include <random>
#include <vector>

#include "check.hpp"
#include "reduce/reduce.hpp"
#include "reduce_reference.hpp"

namespace sealring::testing {

using Bytes = std::vector<std::byte>;

constexpr const char* kDTypeNames[] = {"?",          "float16", "bfloat16", "float32", "float64",
                                       "int8",       "int16",   "int32",    "int64",   "uint8",
                                       "uint16",     "uint32",  "uint64",   "boolean", "complex64",
                                       "complex128", "bytes"};
constexpr const char* kKindNames[] = {"none", "sum", "product", "min", "max",
                                      "band", "bor", "bxor",    "avg", "premul_sum"};

inline const char* name(DType dtype) { return kDTypeNames[static_cast<int>(dtype)]; }
inline const char* name(ReduceKind kind) { return kKindNames[static_cast<int>(kind)]; }

template <class Function>
void for_each_dtype(Function function) {
  for (int i = 1; i <= 15; ++i) function(static_cast<DType>(i));
}

template <class Function>
void for_each_pair(Function function) {
  for_each_dtype([&](DType dtype) {
    for (int k = 1; k <= 9; ++k) {
      const auto kind = static_cast<ReduceKind>(k);
      if (reducible(dtype, kind)) function(dtype, kind);
    }
  });
}

// The corner cases of a type, as raw little-endian items of its part.
inline std::vector<std::uint64_t> corners(DType part) {
  switch (part) {
    case DType::float16:
      return {0, 0x8000, 0x3c00, 0xbc00, 0x7c00, 0xfc00, 0x7e00, 0x7c01, 0xfe01,
              1, 0x8001, 0x03ff, 0x0400, 0x7bff, 0xfbff, 0x3555, 0x1001, 0x6bff};
    case DType::bfloat16:
      return {0, 0x8000, 0x3f80, 0xbf80, 0x7f80, 0xff80, 0x7fc0, 0x7f81, 0xffff,
              1, 0x8001, 0x007f, 0x0080, 0x7f7f, 0xff7f, 0x3eab, 0x3b81, 0x4300};
    case DType::float32:
      return {0,          0x80000000, 0x3f800000, 0xbf800000, 0x7f800000, 0xff800000,
              0x7fc00000, 0x7f800001, 0xffffffff, 1,          0x80000001, 0x007fffff,
              0x00800000, 0x7f7fffff, 0xff7fffff, 0x3eaaaaab, 0x33800001};
    case DType::float64:
      return {0,
              1ull << 63,
              0x3ffull << 52,
              0xbffull << 52,
              0x7ffull << 52,
              0xfffull << 52,
              0x7ff8ull << 48,
              (0x7ffull << 52) + 1,
              ~0ull,
              1,
              (1ull << 63) + 1,
              (1ull << 52) - 1,
              1ull << 52,
              (0x7ffull << 52) - 1,
              (0xfffull << 52) - 1};
    default:
      return {0,          1,      2,      3,          0x7f,       0x80,       0xff,
              0x7fff,     0x8000, 0xffff, 0x7fffffff, 0x80000000, 0xffffffff, (1ull << 63) - 1,
              1ull << 63, ~0ull};
  }
}

// Fills two buffers of `items` elements: every corner case against every other, then numbers of similar size,
// then random bits.
inline void fill(DType dtype, std::size_t items, Bytes& dst, Bytes& src, std::mt19937_64& random) {
  const DType part = reference::part(dtype);
  const std::size_t width = item_bytes(part);
  const std::size_t parts = items * item_bytes(dtype) / width;
  const auto special = corners(part);
  dst.resize(parts * width);
  src.resize(parts * width);
  for (std::size_t i = 0; i < parts; ++i) {
    std::uint64_t a = random(), b = random();
    const bool cornered = i < special.size() * special.size();
    if (cornered) {
      a = special[i % special.size()];
      b = special[i / special.size()];
    } else if (i % 2 == 0) {
      b = a ^ (b & 0x7f7f'7f7f'00ff'00ffull >> (random() % 16));  // mostly the same exponent
    }
    std::memcpy(&dst[i * width], &a, width);
    std::memcpy(&src[i * width], &b, width);
  }
}

inline void check_same(DType dtype, const char* what, const Bytes& got, const Bytes& want) {
  const DType part = reference::part(dtype);
  const std::size_t width = item_bytes(part);
  CHECK(got.size() == want.size());
  for (std::size_t i = 0; i < want.size(); i += width) {
    std::uint64_t got_bits = 0, want_bits = 0;
    std::memcpy(&got_bits, &got[i], width);
    std::memcpy(&want_bits, &want[i], width);
    CHECK_NOTE(reference::same(part, &got[i], &want[i]), "%s %s item %zu of %zu: %llx, want %llx",
               name(dtype), what, i / width, want.size() / width,
               static_cast<unsigned long long>(got_bits),
               static_cast<unsigned long long>(want_bits));
  }
}

}  // namespace sealring::testing
