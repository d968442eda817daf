// Makes the rows of a tensor from samples anywhere in opened memory. Numbers of any size are converted to the
// tensor's type, and a row with too few numbers is filled up.

namespace {

using u8 = unsigned char;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

constexpr u32 kNumbersOfBlock = 4096;  // the numbers of one row that a thread block handles

// ---- What the host hands over (core/engine/cuda/chunks.py packs the same) ----------------------------------

struct Row {
  u64 from;  // the sample's place in the opened memory, which need not be aligned
  u64 bytes;
  i64 item;  // the size of a number, 1 to 8; negative for signed ones
  i64 pad;  // the value that fills the rest of the row
};

struct Taking {
  const u8* plain;
  const Row* rows;
  u8* out;
  u64 length;  // numbers of each row of the tensor
  u32 out_item;  // their size: 1, 2, 4 or 8
  u32 blocks_of_row;
};
static_assert(sizeof(Row) == 32 && sizeof(Taking) == 40);

__device__ __forceinline__ u64 number_at(const u8* from, u32 size, bool is_signed) {
  u64 value = 0;
  for (u32 i = 0; i < size; ++i) value |= (u64)from[i] << 8 * i;
  const u32 unused = 64 - 8 * size;
  return is_signed ? (u64)((i64)(value << unused) >> unused) : value;
}

__device__ __forceinline__ void put(u8* out, u32 size, u64 value) {
  switch (size) {
    case 1:
      *out = (u8)value;
      break;
    case 2:
      *reinterpret_cast<unsigned short*>(out) = (unsigned short)value;
      break;
    case 4:
      *reinterpret_cast<u32*>(out) = (u32)value;
      break;
    default:
      *reinterpret_cast<u64*>(out) = value;
  }
}

}  // namespace

extern "C" __global__ void take_rows(const __grid_constant__ Taking taking) {
  const u64 number = blockIdx.x / taking.blocks_of_row;
  const Row row = taking.rows[number];
  const bool is_signed = row.item < 0;
  const u32 size = (u32)(is_signed ? -row.item : row.item);
  const u64 there = row.bytes / size;
  const u8* const from = taking.plain + row.from;
  u8* const out = taking.out + number * taking.length * taking.out_item;
  const u64 first = (u64)(blockIdx.x % taking.blocks_of_row) * kNumbersOfBlock;
  const u64 end = first + kNumbersOfBlock < taking.length ? first + kNumbersOfBlock : taking.length;
  for (u64 i = first + threadIdx.x; i < end; i += blockDim.x) {
    const u64 value = i < there ? number_at(from + i * size, size, is_signed) : (u64)row.pad;
    put(out + i * taking.out_item, taking.out_item, value);
  }
}
