#include "reduce/reduce.hpp"

#include <bit>
#include <stdexcept>

#include "reduce/loops.hpp"

// Elements travel in their memory representation.
static_assert(std::endian::native == std::endian::little);

namespace sealring {
namespace {

// Addition, multiplication and the bitwise kinds wrap alike for signed and unsigned; only the order
// of values differs. Sharing the unsigned loops halves the code.
template <class T>
ReduceFn integer_function(ReduceKind kind) {
  using Unsigned = std::make_unsigned_t<T>;
  switch (kind) {
    case ReduceKind::sum:
    case ReduceKind::avg:
    case ReduceKind::premul_sum:
      return choose_pairs<PairLoop<Unsigned, Sum>>();
    case ReduceKind::product:
      return choose_pairs<PairLoop<Unsigned, Product>>();
    case ReduceKind::min:
      return choose_pairs<PairLoop<T, Min>>();
    case ReduceKind::max:
      return choose_pairs<PairLoop<T, Max>>();
    case ReduceKind::band:
      return choose_pairs<PairLoop<Unsigned, BitAnd>>();
    case ReduceKind::bor:
      return choose_pairs<PairLoop<Unsigned, BitOr>>();
    case ReduceKind::bxor:
      return choose_pairs<PairLoop<Unsigned, BitXor>>();
    case ReduceKind::none:
      return nullptr;
  }
  return nullptr;
}

template <class T>
ReduceFn float_function(ReduceKind kind) {
  switch (kind) {
    case ReduceKind::sum:
    case ReduceKind::avg:
    case ReduceKind::premul_sum:
      return choose_pairs<PairLoop<T, Sum>>();
    case ReduceKind::product:
      return choose_pairs<PairLoop<T, Product>>();
    case ReduceKind::min:
      return choose_pairs<PairLoop<T, Min>>();
    case ReduceKind::max:
      return choose_pairs<PairLoop<T, Max>>();
    default:
      return nullptr;
  }
}

// T is the type of one part.
template <class T>
ReduceFn complex_function(ReduceKind kind) {
  switch (kind) {
    case ReduceKind::sum:
    case ReduceKind::avg:
    case ReduceKind::premul_sum:
      return choose_pairs<PairLoop<T, Sum>>();
    case ReduceKind::product:
      return choose_pairs<ComplexProductLoop<T>>();
    default:
      return nullptr;
  }
}

ReduceFn boolean_function(ReduceKind kind) {
  switch (kind) {
    case ReduceKind::sum:
    case ReduceKind::max:
    case ReduceKind::bor:
    case ReduceKind::avg:
    case ReduceKind::premul_sum:
      return choose_pairs<PairLoop<std::uint8_t, LogicalOr>>();
    case ReduceKind::product:
    case ReduceKind::min:
    case ReduceKind::band:
      return choose_pairs<PairLoop<std::uint8_t, LogicalAnd>>();
    case ReduceKind::bxor:
      return choose_pairs<PairLoop<std::uint8_t, LogicalXor>>();
    case ReduceKind::none:
      return nullptr;
  }
  return nullptr;
}

template <class T>
void scale(void* data, std::size_t bytes, double factor) {
  using Math = typename Element<T>::Math;
  if constexpr (Narrow16<T>) {
    each<T>(data, bytes, Scale<float>{clean_nan(static_cast<float>(factor))});
  } else {
    each<T>(data, bytes, Scale<Math>{static_cast<Math>(factor)});
  }
}

template <class T>
void divide(void* data, std::size_t bytes, std::uint32_t divisor) {
  using Math = typename Element<T>::Math;
  if constexpr (std::floating_point<Math>) {
    // World sizes are mostly powers of two, whose reciprocal is exact: multiplying by it rounds to
    // the same bits as dividing, several times faster.
    if (std::has_single_bit(divisor)) return scale<T>(data, bytes, 1.0 / divisor);
  }
  using Op = Divide<Math>;
  each<T>(data, bytes, Op{static_cast<decltype(Op::divisor)>(divisor)});
}

// A plain cast of an out-of-range double to an integer is undefined, so the ends are spelled out.
std::uint64_t integer_factor(double factor) {
  if (factor != factor) return 0;
  if (factor <= -0x1p63) return std::uint64_t{1} << 63;
  if (factor < 0x1p63) return static_cast<std::uint64_t>(static_cast<std::int64_t>(factor));
  if (factor < 0x1p64) return static_cast<std::uint64_t>(factor);
  return ~std::uint64_t{0};
}

template <class Unsigned>
void scale_integer(void* data, std::size_t bytes, double factor) {
  const auto wrapped = static_cast<Unsigned>(integer_factor(factor));
  each<Unsigned>(data, bytes, Scale<Unsigned>{wrapped});
}

}  // namespace

const char* name_of(DType dtype) {
  switch (dtype) {
    case DType::float16:
      return "float16";
    case DType::bfloat16:
      return "bfloat16";
    case DType::float32:
      return "float32";
    case DType::float64:
      return "float64";
    case DType::int8:
      return "int8";
    case DType::int16:
      return "int16";
    case DType::int32:
      return "int32";
    case DType::int64:
      return "int64";
    case DType::uint8:
      return "uint8";
    case DType::uint16:
      return "uint16";
    case DType::uint32:
      return "uint32";
    case DType::uint64:
      return "uint64";
    case DType::boolean:
      return "bool";
    case DType::complex64:
      return "complex64";
    case DType::complex128:
      return "complex128";
    case DType::bytes:
      return "bytes";
  }
  return nullptr;
}

const char* name_of(ReduceKind kind) {
  switch (kind) {
    case ReduceKind::none:
      return "none";
    case ReduceKind::sum:
      return "sum";
    case ReduceKind::product:
      return "product";
    case ReduceKind::min:
      return "min";
    case ReduceKind::max:
      return "max";
    case ReduceKind::band:
      return "band";
    case ReduceKind::bor:
      return "bor";
    case ReduceKind::bxor:
      return "bxor";
    case ReduceKind::avg:
      return "avg";
    case ReduceKind::premul_sum:
      return "premul_sum";
  }
  return nullptr;
}

std::size_t item_bytes(DType dtype) {
  switch (dtype) {
    case DType::int8:
    case DType::uint8:
    case DType::boolean:
    case DType::bytes:
      return 1;
    case DType::float16:
    case DType::bfloat16:
    case DType::int16:
    case DType::uint16:
      return 2;
    case DType::float32:
    case DType::int32:
    case DType::uint32:
      return 4;
    case DType::float64:
    case DType::int64:
    case DType::uint64:
    case DType::complex64:
      return 8;
    case DType::complex128:
      return 16;
  }
  return 0;
}

bool reducible(DType dtype, ReduceKind kind) { return reduce_function(dtype, kind) != nullptr; }

ReduceFn reduce_function(DType dtype, ReduceKind kind) {
  switch (dtype) {
    case DType::float16:
      return float_function<Float16>(kind);
    case DType::bfloat16:
      return float_function<BFloat16>(kind);
    case DType::float32:
      return float_function<float>(kind);
    case DType::float64:
      return float_function<double>(kind);
    case DType::int8:
      return integer_function<std::int8_t>(kind);
    case DType::int16:
      return integer_function<std::int16_t>(kind);
    case DType::int32:
      return integer_function<std::int32_t>(kind);
    case DType::int64:
      return integer_function<std::int64_t>(kind);
    case DType::uint8:
      return integer_function<std::uint8_t>(kind);
    case DType::uint16:
      return integer_function<std::uint16_t>(kind);
    case DType::uint32:
      return integer_function<std::uint32_t>(kind);
    case DType::uint64:
      return integer_function<std::uint64_t>(kind);
    case DType::boolean:
      return boolean_function(kind);
    case DType::complex64:
      return complex_function<float>(kind);
    case DType::complex128:
      return complex_function<double>(kind);
    case DType::bytes:
      return nullptr;
  }
  return nullptr;
}

void average(DType dtype, void* data, std::size_t bytes, std::uint32_t divisor) {
  if (divisor == 0) throw std::invalid_argument("an average needs a divisor of at least 1");
  switch (dtype) {
    case DType::float16:
      return divide<Float16>(data, bytes, divisor);
    case DType::bfloat16:
      return divide<BFloat16>(data, bytes, divisor);
    case DType::float32:
    case DType::complex64:
      return divide<float>(data, bytes, divisor);
    case DType::float64:
    case DType::complex128:
      return divide<double>(data, bytes, divisor);
    case DType::int8:
      return divide<std::int8_t>(data, bytes, divisor);
    case DType::int16:
      return divide<std::int16_t>(data, bytes, divisor);
    case DType::int32:
      return divide<std::int32_t>(data, bytes, divisor);
    case DType::int64:
      return divide<std::int64_t>(data, bytes, divisor);
    case DType::uint8:
      return divide<std::uint8_t>(data, bytes, divisor);
    case DType::uint16:
      return divide<std::uint16_t>(data, bytes, divisor);
    case DType::uint32:
      return divide<std::uint32_t>(data, bytes, divisor);
    case DType::uint64:
      return divide<std::uint64_t>(data, bytes, divisor);
    case DType::boolean:
      return;
    case DType::bytes:
      break;
  }
  throw std::invalid_argument("raw bytes have no average: give the tensor's dtype");
}

void premultiply(DType dtype, void* data, std::size_t bytes, double factor) {
  switch (dtype) {
    case DType::float16:
      return scale<Float16>(data, bytes, factor);
    case DType::bfloat16:
      return scale<BFloat16>(data, bytes, factor);
    case DType::float32:
    case DType::complex64:
      return scale<float>(data, bytes, factor);
    case DType::float64:
    case DType::complex128:
      return scale<double>(data, bytes, factor);
    case DType::int8:
    case DType::uint8:
      return scale_integer<std::uint8_t>(data, bytes, factor);
    case DType::int16:
    case DType::uint16:
      return scale_integer<std::uint16_t>(data, bytes, factor);
    case DType::int32:
    case DType::uint32:
      return scale_integer<std::uint32_t>(data, bytes, factor);
    case DType::int64:
    case DType::uint64:
      return scale_integer<std::uint64_t>(data, bytes, factor);
    case DType::boolean:
      if (factor == 0) std::memset(data, 0, bytes);
      return;
    case DType::bytes:
      break;
  }
  throw std::invalid_argument("raw bytes cannot be multiplied: give the tensor's dtype");
}

}  // namespace sealring
