// A program's own computations between its messages, for any number of thread blocks.
#pragma once

#include "gpu_parts.hpp"
#if SEALRING_REDUCES
#include "reductions.hpp"
#endif

namespace {

template <class Function>
__device__ __forceinline__ void each(u64 count, u32 index, u32 blocks, Function function) {
  const u64 step = (u64)blocks * blockDim.x;
  for (u64 i = index * (u64)blockDim.x + threadIdx.x; i < count; i += step) function(i);
}

__device__ __forceinline__ void copy_bytes(u8* to, const u8* from, u64 bytes, u32 index,
                                           u32 blocks) {
  const u64 wide = is_aligned(to) && is_aligned(from) ? bytes / 16 : 0;
  each(wide, index, blocks,
       [&](u64 i) { reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(from)[i]; });
  each(bytes - wide * 16, index, blocks, [&](u64 i) { to[wide * 16 + i] = from[wide * 16 + i]; });
}

__device__ __forceinline__ void fill_bytes(u8* to, u8 with, u64 bytes, u32 index, u32 blocks) {
  const u32 word = with * 0x01010101u;
  const u64 wide = is_aligned(to) ? bytes / 16 : 0;
  each(wide, index, blocks,
       [&](u64 i) { reinterpret_cast<uint4*>(to)[i] = make_uint4(word, word, word, word); });
  each(bytes - wide * 16, index, blocks, [&](u64 i) { to[wide * 16 + i] = with; });
}

#if SEALRING_REDUCES

using sealring::reduce::Element;

__device__ __forceinline__ void reduce_elements(Element* dst, const Element* src, u64 bytes,
                                                u32 index, u32 blocks) {
  each(bytes / sizeof(Element), index, blocks,
       [&](u64 i) { dst[i] = sealring::reduce::combine(dst[i], src[i]); });
}

__device__ __forceinline__ void average_elements(Element* dst, u64 bytes, u32 world, u32 index,
                                                 u32 blocks) {
  each(bytes / sizeof(Element), index, blocks,
       [&](u64 i) { dst[i] = sealring::reduce::divide(dst[i], world); });
}

__device__ __forceinline__ void premultiply_elements(Element* dst, u64 bytes, double factor,
                                                     u32 index, u32 blocks) {
  each(bytes / sizeof(Element), index, blocks,
       [&](u64 i) { dst[i] = sealring::reduce::scale(dst[i], factor); });
}

#endif

}  // namespace
