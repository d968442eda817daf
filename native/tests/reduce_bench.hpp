// How fast the reductions run here: test_reduce --bench.

#pragma once

#include <algorithm>
#include <chrono>
#include <cstdio>

#include "reduce_inputs.hpp"

namespace sealring::testing {

// Uses blocks of 128 KiB, which stay in the second-level cache. For avg, measures only the division, by 7.
inline void bench() {
  constexpr std::size_t kBlock = 128 * 1024;
  constexpr int kRounds = 500;
  std::printf("%-12s %-10s %s\n", "dtype", "kind", "GB/s");
  for_each_pair([&](DType dtype, ReduceKind kind) {
    const bool like_others = kind == ReduceKind::premul_sum || kind == ReduceKind::bor;
    if (like_others || (kind == ReduceKind::avg && dtype == DType::boolean)) return;
    // Products start from zero so that they do not drift into subnormals, slow on some processors.
    const std::byte start{kind == ReduceKind::product ? std::uint8_t{0} : std::uint8_t{0x3c}};
    Bytes dst(kBlock, start), src(kBlock, start);
    const ReduceFn function = reduce_function(dtype, kind);
    const auto block = [&] {
      if (kind == ReduceKind::avg) return average(dtype, dst.data(), kBlock, 7);
      function(dst.data(), src.data(), kBlock);
    };
    double best = 0;
    for (int attempt = 0; attempt < 10; ++attempt) {
      const auto begin = std::chrono::steady_clock::now();
      for (int i = 0; i < kRounds; ++i) block();
      const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
      best = std::max(best, kBlock * kRounds / took.count() / 1e9);
    }
    std::printf("%-12s %-10s %6.1f\n", name(dtype), name(kind), best);
  });
}

}  // namespace sealring::testing
