// The loops over a chunk, and the choice of each loop's build for this processor.
//
// Each loop is compiled for any processor of the architecture, and again for more capable ones: on x86_64 for
// AVX2 with F16C, on aarch64 with hand-written NEON and, for float16, with ARMv8.2's own float16 arithmetic.
// Wheels carry all builds, and the choice is made at run time. All give the same bits.

#pragma once

#include "reduce/operations.hpp"

#if defined(__aarch64__)
#include "reduce/lanes_aarch64.hpp"
#elif defined(__x86_64__)
#include "reduce/lanes_x86_64.hpp"
#endif

namespace sealring {

template <class T, class Op>
struct PairLoop {
  static SEALRING_INLINE void run(std::byte* __restrict dst, const std::byte* __restrict src,
                                  std::size_t bytes) {
    using E = Element<T>;
    for (std::size_t i = 0; i < bytes / sizeof(T); ++i) {
      const auto a = E::open(load<T>(dst + i * sizeof(T)));
      const auto b = E::open(load<T>(src + i * sizeof(T)));
      store(dst + i * sizeof(T), E::close(Op::apply(a, b)));
    }
  }
};

// T is the type of one part. Each product is rounded before the two are added or subtracted.
template <class T>
struct ComplexProductLoop {
  static SEALRING_INLINE void run(std::byte* __restrict dst, const std::byte* __restrict src,
                                  std::size_t bytes) {
    for (std::size_t i = 0; i < bytes / (2 * sizeof(T)); ++i) {
      const std::size_t real = 2 * i * sizeof(T);
      const std::size_t imaginary = real + sizeof(T);
      const T a = load<T>(dst + real), b = load<T>(dst + imaginary);
      const T c = load<T>(src + real), d = load<T>(src + imaginary);
      store(dst + real, a * c - b * d);
      store(dst + imaginary, a * d + b * c);
    }
  }
};

template <class T, class Op>
struct EachLoop {
  static SEALRING_INLINE void run(std::byte* data, std::size_t bytes, Op op) {
    using E = Element<T>;
    for (std::size_t i = 0; i < bytes / sizeof(T); ++i) {
      store(data + i * sizeof(T), E::close(op.apply(E::open(load<T>(data + i * sizeof(T))))));
    }
  }
};

template <class Loop>
void pairs_plain(void* dst, const void* src, std::size_t bytes) {
  Loop::run(static_cast<std::byte*>(dst), static_cast<const std::byte*>(src), bytes);
}

template <class T, class Op>
void each_plain(std::byte* data, std::size_t bytes, Op op) {
  EachLoop<T, Op>::run(data, bytes, op);
}

#ifdef SEALRING_HAS_LANES

namespace lanes {

template <Narrow16 T, class Op>
struct Step<T, Op> {
  // Works on four vectors at once, so that the latency of one is hidden behind the others.
  static constexpr std::size_t kVectors = 4;
  static constexpr std::size_t kBytes = kVectors * lanes::kBytes;
  SEALRING_LANES_TARGET static SEALRING_INLINE void run(std::byte* dst, const std::byte* src) {
    Wide wide[kVectors];
    for (std::size_t i = 0; i < kVectors; ++i) {
      const std::size_t at = i * lanes::kBytes;
      wide[i] = apply(Op{}, open<T>(dst + at), open<T>(src + at));
    }
    for (std::size_t i = 0; i < kVectors; ++i) close<T>(dst + i * lanes::kBytes, wide[i]);
  }
};

}  // namespace lanes

template <class Loop>
struct Lanes : Loop {};

template <class T, class Op>
  requires(lanes::Step<T, Op>::kBytes > 0)
struct Lanes<PairLoop<T, Op>> {
  SEALRING_LANES_TARGET static SEALRING_INLINE void run(std::byte* __restrict dst,
                                                        const std::byte* __restrict src,
                                                        std::size_t bytes) {
    using Step = lanes::Step<T, Op>;
    std::size_t done = 0;
    for (; done + Step::kBytes <= bytes; done += Step::kBytes) Step::run(dst + done, src + done);
    PairLoop<T, Op>::run(dst + done, src + done, bytes - done);
  }
};

template <class Loop>
SEALRING_LANES_TARGET void pairs_lanes(void* dst, const void* src, std::size_t bytes) {
  Lanes<Loop>::run(static_cast<std::byte*>(dst), static_cast<const std::byte*>(src), bytes);
}

template <class T, class Op>
SEALRING_LANES_TARGET void each_lanes(std::byte* data, std::size_t bytes, Op op) {
  std::size_t done = 0;
  if constexpr (Narrow16<T>) {
    for (; done + lanes::kBytes <= bytes; done += lanes::kBytes) {
      lanes::close<T>(data + done, lanes::apply(op, lanes::open<T>(data + done)));
    }
  }
  EachLoop<T, Op>::run(data + done, bytes - done, op);
}

#endif

#ifdef SEALRING_HAS_NATIVE_FLOAT16

template <class Loop>
constexpr auto kNativeFloat16 = nullptr;

template <class Op>
SEALRING_FLOAT16_TARGET void pairs_native_float16(void* dst, const void* src, std::size_t bytes) {
  auto* to = static_cast<std::byte*>(dst);
  const auto* from = static_cast<const std::byte*>(src);
  std::size_t done = 0;
  for (; done + 16 <= bytes; done += 16) native_float16::step<Op>(to + done, from + done);
  PairLoop<Float16, Op>::run(to + done, from + done, bytes - done);
}

template <class Op>
constexpr auto kNativeFloat16<PairLoop<Float16, Op>> = &pairs_native_float16<Op>;

#endif

template <class Loop>
auto choose_pairs() -> void (*)(void*, const void*, std::size_t) {
#ifdef SEALRING_HAS_NATIVE_FLOAT16
  if (kNativeFloat16<Loop> != nullptr && native_float16::available()) return kNativeFloat16<Loop>;
#endif
#ifdef SEALRING_HAS_LANES
  if (lanes::available()) return &pairs_lanes<Loop>;
#endif
  return &pairs_plain<Loop>;
}

template <class T, class Op>
void each(void* data, std::size_t bytes, Op op) {
#ifdef SEALRING_HAS_LANES
  if (lanes::available()) return each_lanes<T>(static_cast<std::byte*>(data), bytes, op);
#endif
  return each_plain<T>(static_cast<std::byte*>(data), bytes, op);
}

}  // namespace sealring
