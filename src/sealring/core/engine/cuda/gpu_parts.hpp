// How thread blocks work together and access memory: clusters that share a record, and loads and stores at
// any address.
#pragma once

#include "chacha20_poly1305.hpp"

namespace {

using namespace sealring::chacha;

constexpr u32 kTagBytes = 16;

// ---- Clusters ----------------------------------------------------------------------------------

__device__ __forceinline__ u32 part_of_record() {
  u32 rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ __forceinline__ u32 parts_of_record() {
  u32 size;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return size;
}

__device__ __forceinline__ void meet() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Reads a word of another part's shared memory.
__device__ __forceinline__ u32 remote(const u32& here, u32 part) {
  u32 at = (u32)__cvta_generic_to_shared(&here), there, value;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(part));
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(there) : "memory");
  return value;
}

__device__ __forceinline__ Number remote(const Number& here, u32 part) {
  Number out;
#pragma unroll
  for (int i = 0; i < 5; ++i) out.limb[i] = remote(here.limb[i], part);
  return out;
}

// ---- Memory ------------------------------------------------------------------------------------

// Loads that the compiler may not move out of a loop: keeping the values in registers would leave room for
// fewer threads, which costs more than loading again.
__device__ __forceinline__ void fetch4(const u32* shared_words, u32* to) {
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"((u32)__cvta_generic_to_shared(shared_words)));
}

__device__ __forceinline__ Factor fetch(const Factor& from) {
  u32 w[12];
#pragma unroll
  for (int i = 0; i < 12; i += 4) fetch4(reinterpret_cast<const u32*>(&from) + i, w + i);
  return {{w[0], w[1], w[2], w[3], w[4]}, {w[5], w[6], w[7], w[8]}, {}};
}

__device__ __noinline__ void load_bytes(const u8* from, u32* to) {
#pragma unroll 1
  for (u32 i = 0; i < 16; ++i) {
    const u8* at = from + 4 * i;
    to[i] = at[0] | at[1] << 8 | at[2] << 16 | (u32)at[3] << 24;
  }
}

__device__ __noinline__ void store_bytes(u8* to, u32 bytes, const u32* from) {
#pragma unroll 1
  for (u32 i = 0; i < bytes; ++i) to[i] = (u8)(from[i / 4] >> 8 * (i % 4));
}

__device__ __forceinline__ bool is_aligned(const u8* at) { return ((u64)at & 15) == 0; }

__device__ __forceinline__ void load(const u8* from, bool aligned, u32 (&to)[16]) {
  if (aligned) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint4 v = reinterpret_cast<const uint4*>(from)[i];
      to[4 * i] = v.x, to[4 * i + 1] = v.y, to[4 * i + 2] = v.z, to[4 * i + 3] = v.w;
    }
  } else {
    u32 words[16];
    load_bytes(from, words);
#pragma unroll
    for (int i = 0; i < 16; ++i) to[i] = words[i];
  }
}

__device__ __forceinline__ void store(u8* to, bool aligned, const u32 (&from)[16]) {
  if (aligned) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      reinterpret_cast<uint4*>(to)[i] =
          make_uint4(from[4 * i], from[4 * i + 1], from[4 * i + 2], from[4 * i + 3]);
    }
  } else {
    u32 words[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) words[i] = from[i];
    store_bytes(to, 64, words);
  }
}

// Loads fewer than 64 bytes from any address and fills up with zeros. Called by one thread, once per record.
__device__ __noinline__ void load_tail(const u8* from, u32 bytes, u32* to) {
#pragma unroll 1
  for (u32 i = 0; i < 16; ++i) to[i] = 0;
#pragma unroll 1
  for (u32 i = 0; i < bytes; ++i) to[i / 4] |= (u32)from[i] << 8 * (i % 4);
}

__device__ __forceinline__ Tag tag_on_wire(const u8* from) {
  u32 words[16];
  if (((u64)from & 3) == 0) {
    for (int i = 0; i < 4; ++i) words[i] = reinterpret_cast<const u32*>(from)[i];
  } else {
    load_tail(from, kTagBytes, words);
  }
  return {{words[0], words[1], words[2], words[3]}};
}

__device__ __forceinline__ void store_tag(u8* to, const Tag& tag) {
  if (((u64)to & 3) == 0) {
    for (int i = 0; i < 4; ++i) reinterpret_cast<u32*>(to)[i] = tag.word[i];
  } else {
    store_bytes(to, kTagBytes, tag.word);
  }
}

// The mask of word i's bytes that belong to a tail of `bytes`.
__device__ __forceinline__ u32 kept_of_word(u32 i, u32 bytes) {
  const u32 left = bytes > 4 * i ? bytes - 4 * i : 0;
  return left >= 4 ? ~0u : (1u << 8 * left) - 1;
}

}  // namespace
