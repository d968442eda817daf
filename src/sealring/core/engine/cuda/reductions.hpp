// dst op incoming, element by element, as tests/core/reference.py defines it to the bit.
//
// One pair of element type and reduction is compiled at a time: SEALRING_DTYPE and SEALRING_KIND hold their
// numbers in records (docs/spec.md). Compile with -fmad=false: nothing may be fused.
#pragma once

#include "chacha20_poly1305.hpp"

namespace sealring::reduce {

using chacha::u32;
using chacha::u64;

enum Kind { none, sum, product, min, max, band, bor, bxor, avg, premul_sum };
constexpr Kind kKind = static_cast<Kind>(SEALRING_KIND);

struct Half {
  unsigned short bits;
};
struct Brain {
  unsigned short bits;
};
struct Boolean {
  unsigned char byte;
};
template <class T>
struct Complex {
  T re, im;
};

template <int dtype>
struct ElementOf;
template <>
struct ElementOf<1> {
  using Type = Half;
};
template <>
struct ElementOf<2> {
  using Type = Brain;
};
template <>
struct ElementOf<3> {
  using Type = float;
};
template <>
struct ElementOf<4> {
  using Type = double;
};
template <>
struct ElementOf<5> {
  using Type = signed char;
};
template <>
struct ElementOf<6> {
  using Type = short;
};
template <>
struct ElementOf<7> {
  using Type = int;
};
template <>
struct ElementOf<8> {
  using Type = long long;
};
template <>
struct ElementOf<9> {
  using Type = unsigned char;
};
template <>
struct ElementOf<10> {
  using Type = unsigned short;
};
template <>
struct ElementOf<11> {
  using Type = u32;
};
template <>
struct ElementOf<12> {
  using Type = u64;
};
template <>
struct ElementOf<13> {
  using Type = Boolean;
};
template <>
struct ElementOf<14> {
  using Type = Complex<float>;
};
template <>
struct ElementOf<15> {
  using Type = Complex<double>;
};
using Element = typename ElementOf<SEALRING_DTYPE>::Type;

// Looks at the bits, because a comparison cannot tell -0 from +0.
SEALRING_EVERYWHERE bool negative(float x) { return __float_as_int(x) < 0; }
SEALRING_EVERYWHERE bool negative(double x) { return __double_as_longlong(x) < 0; }

template <class F>
SEALRING_EVERYWHERE F real(F a, F b) {
  if constexpr (kKind == product) return a * b;
  if constexpr (kKind == min) return b < a || b != b || (b == a && negative(b)) ? b : a;
  if constexpr (kKind == max) return b > a || b != b || (b == a && !negative(b)) ? b : a;
  return a + b;
}

SEALRING_EVERYWHERE float combine(float a, float b) { return real(a, b); }
SEALRING_EVERYWHERE double combine(double a, double b) { return real(a, b); }

SEALRING_EVERYWHERE float widen(Half x) {
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(x.bits));
  return wide;
}
SEALRING_EVERYWHERE float widen(Brain x) { return __uint_as_float((u32)x.bits << 16); }
SEALRING_EVERYWHERE Half narrow(float x, Half) {
  Half out;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out.bits) : "f"(x));
  return out;
}
SEALRING_EVERYWHERE Brain narrow(float x, Brain) {
  Brain out;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out.bits) : "f"(x));
  return out;
}
SEALRING_EVERYWHERE Half combine(Half a, Half b) { return narrow(real(widen(a), widen(b)), a); }
SEALRING_EVERYWHERE Brain combine(Brain a, Brain b) { return narrow(real(widen(a), widen(b)), a); }

SEALRING_EVERYWHERE Boolean combine(Boolean a, Boolean b) {
  const bool x = a.byte != 0, y = b.byte != 0;
  if constexpr (kKind == product || kKind == min || kKind == band) return {x && y};
  if constexpr (kKind == bxor) return {x != y};
  return {x || y};
}

template <class T>
SEALRING_EVERYWHERE Complex<T> combine(Complex<T> a, Complex<T> b) {
  if constexpr (kKind == product) return {a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re};
  return {a.re + b.re, a.im + b.im};
}

// Integers wrap around: computed in 64 unsigned bits, the bits that are kept are right.
template <class T>
SEALRING_EVERYWHERE T combine(T a, T b) {
  if constexpr (kKind == min) return b < a ? b : a;
  if constexpr (kKind == max) return b > a ? b : a;
  if constexpr (kKind == band) return a & b;
  if constexpr (kKind == bor) return a | b;
  if constexpr (kKind == bxor) return a ^ b;
  if constexpr (kKind == product) return (T)((u64)a * (u64)b);
  return (T)((u64)a + (u64)b);
}

// The last step of an average: divides the sum.
SEALRING_EVERYWHERE float divide(float x, u32 by) { return __fdiv_rn(x, (float)by); }
SEALRING_EVERYWHERE double divide(double x, u32 by) { return __ddiv_rn(x, (double)by); }
SEALRING_EVERYWHERE Half divide(Half x, u32 by) { return narrow(divide(widen(x), by), x); }
SEALRING_EVERYWHERE Brain divide(Brain x, u32 by) { return narrow(divide(widen(x), by), x); }
SEALRING_EVERYWHERE Boolean divide(Boolean x, u32) { return x; }
template <class T>
SEALRING_EVERYWHERE Complex<T> divide(Complex<T> x, u32 by) {
  return {divide(x.re, by), divide(x.im, by)};
}
template <class T>
SEALRING_EVERYWHERE T divide(T x, u32 by) {
  if constexpr ((T)-1 < (T)0) return (T)((long long)x / (long long)by);
  return (T)((u64)x / by);
}

// The first step of a PREMUL_SUM: multiplies the input. Integers are not scaled here.
SEALRING_EVERYWHERE float scale(float x, double by) { return __fmul_rn(x, (float)by); }
SEALRING_EVERYWHERE double scale(double x, double by) { return __dmul_rn(x, by); }
SEALRING_EVERYWHERE Half scale(Half x, double by) { return narrow(scale(widen(x), by), x); }
SEALRING_EVERYWHERE Brain scale(Brain x, double by) { return narrow(scale(widen(x), by), x); }
template <class T>
SEALRING_EVERYWHERE Complex<T> scale(Complex<T> x, double by) {
  return {scale(x.re, by), scale(x.im, by)};
}
template <class T>
SEALRING_EVERYWHERE T scale(T x, double) {
  return x;
}

// Combines the elements of 64 bytes in place: dst = dst op incoming.
SEALRING_EVERYWHERE void combine_block(u32 (&dst)[16], const u32 (&incoming)[16]) {
  constexpr int kCount = 64 / sizeof(Element);
  union Block {
    u32 word[16];
    Element element[kCount];
    __device__ Block() {}
  } a, b;
  SEALRING_UNROLL
  for (int i = 0; i < 16; ++i) a.word[i] = dst[i], b.word[i] = incoming[i];
  SEALRING_UNROLL
  for (int i = 0; i < kCount; ++i) a.element[i] = combine(a.element[i], b.element[i]);
  SEALRING_UNROLL
  for (int i = 0; i < 16; ++i) dst[i] = a.word[i];
}

}  // namespace sealring::reduce
