// The reductions of one chunk's elements: dst[i] = dst[i] op src[i].
//
// Results are defined to the bit, so that a sum does not depend on the machine that formed it:
//
//   float32, float64    one IEEE operation, round to nearest even; never fused, never reordered
//   float16, bfloat16   both sides widened to float32, one float32 operation, rounded once to
//                       nearest even; overflow gives infinity, subnormals are kept
//   min, max            a NaN on either side gives NaN, and -0 is less than +0
//   int*, uint*         wrap around modulo 2^bits
//   boolean             one byte, any nonzero is true, written as 0 or 1:
//                       sum, max, bor, avg, premul_sum: or; product, min, band: and; bxor: xor
//   complex64, 128      parts as their float; product is (ac - bd, ad + bc) with no repair of
//                       infinities; no min, max or bitwise kinds
//   bytes               moved, never reduced
//
// Only the kind of NaN is not defined: processors differ in the sign and payload that they give a NaN.
// Rounding a NaN to 16 bits makes it quiet and keeps its sign and the top of its payload.
//
// This holds in the default floating-point environment, compiled with -ffp-contract=off and without
// -ffast-math. Pointers need no alignment. Nothing here allocates, and every ReduceFn is reentrant.

#pragma once

#include <cstddef>
#include <cstdint>

namespace sealring {

// Values travel on the wire: never renumber.
enum class DType : std::uint8_t {
  float16 = 1,
  bfloat16 = 2,
  float32 = 3,
  float64 = 4,
  int8 = 5,
  int16 = 6,
  int32 = 7,
  int64 = 8,
  uint8 = 9,
  uint16 = 10,
  uint32 = 11,
  uint64 = 12,
  boolean = 13,
  complex64 = 14,
  complex128 = 15,
  bytes = 16,
};

enum class ReduceKind : std::uint8_t {
  none = 0,
  sum = 1,
  product = 2,
  min = 3,
  max = 4,
  band = 5,
  bor = 6,
  bxor = 7,
  avg = 8,
  premul_sum = 9,
};

// The names that errors use; nullptr for values outside the enums.
const char* name_of(DType dtype);
const char* name_of(ReduceKind kind);

// Size of one element; 1 for bytes, 0 for a value that is no DType.
std::size_t item_bytes(DType dtype);

// Whether this kind is defined for this dtype. False for kind none, for bytes, and for values outside the
// enums.
bool reducible(DType dtype, ReduceKind kind);

// dst[i] = dst[i] op src[i]. `bytes` is a multiple of the item size; dst and src do not overlap.
using ReduceFn = void (*)(void* dst, const void* src, std::size_t bytes);

// The function for this dtype and kind, or nullptr if they are not reducible. For avg and premul_sum it adds:
// average() follows the last addition, premultiply() comes before the first.
ReduceFn reduce_function(DType dtype, ReduceKind kind);

// Divides the finished sum. Floats and both parts of a complex number are divided in their own type (float16
// and bfloat16 in float32, rounded once). Integers truncate toward zero; booleans do not change. Throws
// std::invalid_argument for bytes or for divisor 0.
void average(DType dtype, void* data, std::size_t bytes, std::uint32_t divisor);

// Multiplies one rank's input. The factor is first converted to the element type (float16 and bfloat16: to
// float32, multiplied there, rounded once). For integers the conversion drops the fraction, saturates at the
// ends of the 64-bit types, takes NaN as 0, and wraps to the type's width; the product wraps too. A boolean
// does not change if the factor is nonzero and becomes false if it is 0. Throws std::invalid_argument for
// bytes.
void premultiply(DType dtype, void* data, std::size_t bytes, double factor);

}  // namespace sealring
