// Compares every dtype and kind with reduce_reference.hpp. With --bench, prints rates instead.

#include <random>
#include <stdexcept>
#include <string>

#include "check.hpp"
#include "reduce/loops.hpp"
#include "reduce/reduce.hpp"
#include "reduce_bench.hpp"
#include "reduce_inputs.hpp"
#include "reduce_reference.hpp"

using namespace sealring;
using namespace sealring::testing;

namespace {

void check_pair(DType dtype, ReduceKind kind, const Bytes& dst, const Bytes& src) {
  Bytes got = dst, want = dst;
  const Bytes src_before = src;
  reduce_function(dtype, kind)(got.data(), src.data(), got.size());
  for (std::size_t i = 0; i < want.size(); i += item_bytes(dtype)) {
    reference::pair(dtype, kind, &want[i], &src[i]);
  }
  check_same(dtype, name(kind), got, want);
  CHECK(src == src_before);
}

}  // namespace

TEST(items_have_their_sizes) {
  const std::size_t sizes[] = {0, 2, 2, 4, 8, 1, 2, 4, 8, 1, 2, 4, 8, 1, 8, 16, 1, 0};
  for (int i = 0; i <= 17; ++i) CHECK(item_bytes(static_cast<DType>(i)) == sizes[i]);
}

TEST(only_meaningful_pairs_are_reducible) {
  // One column for each kind, from none to premul_sum.
  const std::string floats = "0111100011", integers = "0111111111", complexes = "0110000011";
  for (int d = 0; d <= 17; ++d) {
    const auto dtype = static_cast<DType>(d);
    std::string want = "0000000000";
    if (d >= 1 && d <= 15) want = d <= 4 ? floats : d <= 13 ? integers : complexes;
    for (int k = 0; k <= 10; ++k) {
      const auto kind = static_cast<ReduceKind>(k);
      CHECK_NOTE(reducible(dtype, kind) == (k <= 9 && want[k] == '1'), "dtype %d kind %d", d, k);
      CHECK(reducible(dtype, kind) == (reduce_function(dtype, kind) != nullptr));
    }
  }
}

TEST(every_pair_matches_the_reference) {
  std::mt19937_64 random(1);
  for_each_pair([&](DType dtype, ReduceKind kind) {
    Bytes dst, src;
    fill(dtype, 5003, dst, src, random);
    check_pair(dtype, kind, dst, src);
  });
}

TEST(every_short_length_matches_the_reference) {
  std::mt19937_64 random(2);
  for_each_pair([&](DType dtype, ReduceKind kind) {
    Bytes dst, src;
    for (std::size_t items = 0; items <= 67; ++items) {
      fill(dtype, items, dst, src, random);
      check_pair(dtype, kind, dst, src);
    }
  });
}

TEST(neighbouring_bytes_stay_and_alignment_does_not_matter) {
  std::mt19937_64 random(3);
  for_each_pair([&](DType dtype, ReduceKind kind) {
    for (std::size_t offset = 1; offset < 16; offset += 3) {
      Bytes dst, src, want;
      fill(dtype, 37, dst, src, random);
      Bytes got(offset + dst.size() + 32, std::byte{0xa5}), from(offset + src.size());
      std::memcpy(&got[offset], dst.data(), dst.size());
      std::memcpy(&from[offset], src.data(), src.size());
      reduce_function(dtype, kind)(&got[offset], &from[offset], dst.size());
      for (std::size_t i = 0; i < got.size(); ++i) {
        if (i < offset || i >= offset + dst.size()) CHECK(got[i] == std::byte{0xa5});
      }
      reduce_function(dtype, kind)(dst.data(), src.data(), dst.size());
      check_same(dtype, name(kind), Bytes(&got[offset], &got[offset] + dst.size()), dst);
    }
  });
}

TEST(known_values) {
  const auto run = [](DType dtype, ReduceKind kind, auto a, auto b) {
    reduce_function(dtype, kind)(&a, &b, sizeof a);
    return a;
  };
  CHECK(run(DType::int8, ReduceKind::sum, std::int8_t{127}, std::int8_t{1}) == -128);
  CHECK(run(DType::uint8, ReduceKind::sum, std::uint8_t{255}, std::uint8_t{1}) == 0);
  CHECK(run(DType::uint16, ReduceKind::product, std::uint16_t{65535}, std::uint16_t{65535}) == 1);
  CHECK(run(DType::int64, ReduceKind::product, INT64_MIN, std::int64_t{-1}) == INT64_MIN);
  CHECK(run(DType::int32, ReduceKind::min, -1, 1) == -1);
  CHECK(run(DType::uint32, ReduceKind::min, ~0u, 1u) == 1u);
  CHECK(run(DType::boolean, ReduceKind::sum, std::uint8_t{2}, std::uint8_t{4}) == 1);
  CHECK(run(DType::boolean, ReduceKind::band, std::uint8_t{2}, std::uint8_t{4}) == 1);
  CHECK(run(DType::boolean, ReduceKind::bxor, std::uint8_t{2}, std::uint8_t{4}) == 0);
  CHECK(std::signbit(run(DType::float32, ReduceKind::min, 0.0f, -0.0f)));
  CHECK(!std::signbit(run(DType::float64, ReduceKind::max, -0.0, 0.0)));
  CHECK(std::isnan(run(DType::float32, ReduceKind::max, 1.0f, NAN)));
  CHECK(std::isnan(run(DType::float64, ReduceKind::min, double{NAN}, 1.0)));
  const auto half = [&](ReduceKind kind, int a, int b) {
    return run(DType::float16, kind, static_cast<std::uint16_t>(a), static_cast<std::uint16_t>(b));
  };
  CHECK(half(ReduceKind::sum, 0x3c00, 0x3c00) == 0x4000);  // 1 + 1 = 2
  CHECK(half(ReduceKind::sum, 0x7bff, 0x4c00) == 0x7c00);  // 65504 + 16 = 65520, a tie, overflows
  CHECK(half(ReduceKind::sum, 0x7bff, 0x4bff) == 0x7bff);  // just below it does not
  CHECK(half(ReduceKind::sum, 0x0001, 0x03ff) == 0x0400);  // subnormals add up to a normal
  CHECK(half(ReduceKind::sum, 0x6800, 0x3c00) == 0x6800);  // 2048 + 1: a tie goes to even
}

TEST(a_complex_product_is_not_fused) {
  // (1 + e)^2 - (1 + 2e): zero when both products are rounded, e^2 when one is fused.
  const float e = 0x1p-23f;
  float a[2] = {1 + e, 1};
  const float b[2] = {1 + e, 1 + 2 * e};
  reduce_function(DType::complex64, ReduceKind::product)(a, b, sizeof a);
  CHECK_NOTE(a[0] == 0, "compile with -ffp-contract=off");
}

TEST(all_16_bit_floats_match_the_reference) {
  std::mt19937_64 random(4);
  for (const DType dtype : {DType::float16, DType::bfloat16}) {
    auto partners = corners(dtype);
    for (int i = 0; i < 14; ++i) partners.push_back(random() & 0xffff);
    for (const std::uint64_t partner : partners) {
      std::vector<std::uint16_t> all(65536), other(65536, static_cast<std::uint16_t>(partner));
      for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<std::uint16_t>(i);
      const auto* first = reinterpret_cast<const std::byte*>(all.data());
      const auto* second = reinterpret_cast<const std::byte*>(other.data());
      const Bytes dst(first, first + 131072), src(second, second + 131072);
      for (const auto kind :
           {ReduceKind::sum, ReduceKind::product, ReduceKind::min, ReduceKind::max}) {
        check_pair(dtype, kind, dst, src);
      }
    }
  }
}

template <class T>
void check_round_trip(DType dtype, int infinity, int quiet) {
  for (int i = 0; i < 65536; ++i) {
    const T value{static_cast<std::uint16_t>(i)};
    const bool nan = (i & 0x7fff) > infinity;
    const int want = nan ? i | quiet : i;
    CHECK_NOTE(narrow<T>(widen(value)).bits == want, "%s %04x", name(dtype), i);
    std::uint16_t scaled[9];  // eight through the lanes and one through the scalar tail
    for (auto& each : scaled) each = value.bits;
    premultiply(dtype, scaled, sizeof scaled, 1.0);
    CHECK_NOTE(scaled[0] == want && scaled[8] == want, "%s %04x: %04x and %04x, want %04x",
               name(dtype), i, scaled[0], scaled[8], want);
  }
}

TEST(all_16_bit_floats_survive_the_round_trip) {
  check_round_trip<Float16>(DType::float16, 0x7c00, 0x0200);
  check_round_trip<BFloat16>(DType::bfloat16, 0x7f80, 0x0040);
}

// Tries every 16-bit value and every tie between two, and the float32 numbers next to them.
template <class T>
void check_rounding(DType dtype, int infinity) {
  for (int i = 0; i < infinity; ++i) {
    const float low = widen(T{static_cast<std::uint16_t>(i)});
    const float next = i + 1 == infinity && dtype == DType::float16
                           ? 65536.0f
                           : widen(T{static_cast<std::uint16_t>(i + 1)});
    const float tie = std::isinf(next) ? std::bit_cast<float>(0x7f7f8000u) : low / 2 + next / 2;
    for (const float centre : {low, tie}) {
      for (const float value :
           {std::nextafter(centre, -1.0f), centre, std::nextafter(centre, INFINITY)}) {
        for (const float side : {value, -value}) {
          const auto got = narrow<T>(side).bits;
          const auto want = reference::encode16(dtype, side);
          CHECK_NOTE(got == want, "%s %a: %04x, want %04x", name(dtype), side, got, want);
        }
      }
    }
  }
}

TEST(rounding_to_16_bits_is_to_nearest_even) {
  check_rounding<Float16>(DType::float16, 0x7c00);
  check_rounding<BFloat16>(DType::bfloat16, 0x7f80);
}

TEST(a_nan_rounds_to_a_nan_of_its_sign_and_payload) {
  for (const std::uint32_t sign : {0u, 0x80000000u}) {
    for (const std::uint32_t payload : {1u, 0x1fffu, 0x2000u, 0xffffu, 0x155555u, 0x3fffffu}) {
      const float nan = std::bit_cast<float>(sign | 0x7f800000u | payload);
      const std::uint32_t top = sign >> 16;
      CHECK(narrow<Float16>(nan).bits == (top | 0x7e00u | payload >> 13));
      CHECK(narrow<BFloat16>(nan).bits == (top | 0x7fc0u | payload >> 16));
    }
  }
}

// This processor chose one build of each loop; the other builds must give the same bits.
TEST(every_build_of_a_16_bit_loop_gives_the_same_bits) {
  std::mt19937_64 random(5);
  const auto check = [&]<class T, class Op>(T, Op, DType dtype, ReduceKind kind) {
    using Loop = PairLoop<T, Op>;
    Bytes dst, src;
    fill(dtype, 100003, dst, src, random);
    Bytes chosen = dst, plain = dst;
    reduce_function(dtype, kind)(chosen.data(), src.data(), dst.size());
    pairs_plain<Loop>(plain.data(), src.data(), dst.size());
    check_same(dtype, name(kind), plain, chosen);
#ifdef SEALRING_HAS_LANES
    if (!lanes::available()) return;
    Bytes wide = dst;
    pairs_lanes<Loop>(wide.data(), src.data(), dst.size());
    check_same(dtype, name(kind), wide, chosen);
#endif
  };
  const auto check_kinds = [&](auto narrow, DType dtype) {
    check(narrow, Sum{}, dtype, ReduceKind::sum);
    check(narrow, Product{}, dtype, ReduceKind::product);
    check(narrow, Min{}, dtype, ReduceKind::min);
    check(narrow, Max{}, dtype, ReduceKind::max);
  };
  check_kinds(Float16{}, DType::float16);
  check_kinds(BFloat16{}, DType::bfloat16);
}

TEST(averages_match_the_reference) {
  std::mt19937_64 random(6);
  for_each_dtype([&](DType dtype) {
    const DType part = reference::part(dtype);
    for (const std::uint32_t divisor : {1u, 2u, 3u, 7u, 8u, 127u, 128u, 255u, 256u, 1000u, 65535u,
                                        65537u, 0x1000001u, 0x7fffffffu, 0x80000000u, ~0u}) {
      Bytes got, unused;
      fill(dtype, 2003, got, unused, random);
      Bytes want = got;
      average(dtype, got.data(), got.size(), divisor);
      for (std::size_t i = 0; i < want.size(); i += item_bytes(part)) {
        reference::average(part, &want[i], divisor);
      }
      check_same(dtype, std::to_string(divisor).c_str(), got, want);
    }
  });
}

TEST(averages_of_all_16_bit_integers_truncate) {
  for (std::uint32_t divisor = 1; divisor < 70000; divisor += divisor < 300 ? 1 : 997) {
    std::vector<std::int16_t> values(65536);
    std::vector<std::uint16_t> unsigned_values(65536);
    for (int i = 0; i < 65536; ++i) values[i] = static_cast<std::int16_t>(unsigned_values[i] = i);
    average(DType::int16, values.data(), 131072, divisor);
    average(DType::uint16, unsigned_values.data(), 131072, divisor);
    for (int i = 0; i < 65536; ++i) {
      CHECK(values[i] == static_cast<std::int16_t>(i) / static_cast<std::int64_t>(divisor));
      CHECK(unsigned_values[i] == static_cast<unsigned>(i) / divisor);
    }
  }
}

TEST(premultiplication_matches_the_reference) {
  std::mt19937_64 random(7);
  for_each_dtype([&](DType dtype) {
    const DType part = reference::part(dtype);
    for (const double factor : {1.0, 0.0, -1.0, 2.0, 0.125, 1.0 / 3, 300.7, -70000.5, 1e9}) {
      Bytes got, unused;
      fill(dtype, 2003, got, unused, random);
      Bytes want = got;
      premultiply(dtype, got.data(), got.size(), factor);
      for (std::size_t i = 0; i < want.size(); i += item_bytes(part)) {
        reference::premultiply(part, &want[i], factor);
      }
      check_same(dtype, std::to_string(factor).c_str(), got, want);
    }
  });
}

TEST(a_nan_or_infinite_factor_reaches_every_float) {
  const double crowded_nan = std::bit_cast<double>(0x7fff'ffff'ffff'ffffull);
  for (const DType dtype : {DType::float16, DType::bfloat16}) {
    for (const double factor : {crowded_nan, -crowded_nan, double{INFINITY}}) {
      Bytes got(2 * 37), want;
      std::uint16_t one = reference::encode16(dtype, 1);
      for (std::size_t i = 0; i < got.size(); i += 2) std::memcpy(&got[i], &one, 2);
      want = got;
      premultiply(dtype, got.data(), got.size(), factor);
      for (std::size_t i = 0; i < want.size(); i += 2) {
        reference::premultiply(dtype, &want[i], factor);
      }
      check_same(dtype, "factor", got, want);
    }
  }
}

TEST(integer_factors_saturate_at_64_bits) {
  const auto times = [](DType dtype, double factor) {
    std::uint64_t value = 1;
    premultiply(dtype, &value, 8, factor);
    return value;
  };
  CHECK(times(DType::uint64, 0x1p63) == 1ull << 63);
  CHECK(times(DType::uint64, 1e300) == ~0ull);
  CHECK(times(DType::int64, -INFINITY) == 1ull << 63);
  CHECK(times(DType::int64, NAN) == 0);
  CHECK(times(DType::uint64, -1.9) == ~0ull);
}

TEST(bytes_and_a_zero_divisor_are_refused) {
  float value = 1;
  CHECK_THROWS(std::invalid_argument, average(DType::bytes, &value, 4, 2));
  CHECK_THROWS(std::invalid_argument, average(DType::float32, &value, 4, 0));
  CHECK_THROWS(std::invalid_argument, premultiply(DType::bytes, &value, 4, 2));
  CHECK(value == 1);
}

int main(int argc, char** argv) {
  if (argc == 2 && std::strcmp(argv[1], "--bench") == 0) return bench(), 0;
  return run(argc, argv);
}
