// Records sealed and opened by the GPU that holds the tensor.
//
// A thread block takes one record, or several take one together, as a cluster: each then has a
// "part" of it. Whoever opens goes over the record twice: first the tag, then, if it is good,
// everything else. A forged record leaves no trace. The wire must therefore lie in memory that
// nobody but this worker can write; what comes from elsewhere is copied there first.
//
// The host compiles this once with SEALRING_REDUCES 0 for `seal` and `open`, and once per element
// type and reduction for those that compute.

#include "chacha20_poly1305.hpp"
#if SEALRING_REDUCES
#include "reductions.hpp"
#endif

// What was found best on an H200 (docs/performance.md): double rounds written out at a time, and how
// many blocks of threads a multiprocessor must have room for, which bounds their registers.
#ifndef SEALRING_ROUNDS
#define SEALRING_ROUNDS 5
#endif
#ifndef SEALRING_BLOCKS
#define SEALRING_BLOCKS (SEALRING_REDUCES ? 7 : 8)
#endif

using namespace sealring::chacha;

namespace {

constexpr u32 kHeaderBytes = 64, kTagBytes = 16, kContextBytes = 32;
constexpr u32 kPayloadAt = kHeaderBytes + kTagBytes;
constexpr u32 kOverhead = kPayloadAt + kTagBytes;
constexpr u32 kAssociatedBytes = kHeaderBytes + kContextBytes;
constexpr u32 kHeaderLane = 0x80000000;

// ---- What the host hands over (engine/cuda/kernels.py and native/cuda_device.cpp pack the same) --

// The records of one direction. Length, count and segment are those of the first record; further
// ones of the launch count on from there.
struct Wire {
  u8* records;
  const u32* key;
  u32 header[16];
};

struct Launch {
  Wire in, out;
  const u8* local;  // sealed, or reduced with what comes in
  u8* result;       // where the plaintext goes, if anywhere
  u64 bytes;
  u64* failed;  // gets the number of a record that is not authentic
  u32 context[8];
  u32 record_bytes;
  u32 log_turns;
  u32 one;
  u32 unused;
};
static_assert(sizeof(Wire) == 80 && sizeof(Launch) == 240);

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

// A word of another part's shared memory.
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

// Loads that the compiler may not move out of a loop: keeping what they fetch in registers would
// cost more threads than fetching it costs time.
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

// Fewer than 64 bytes, at any address; by one thread, once per record. The rest is zeros.
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

// ---- One record --------------------------------------------------------------------------------

// What one direction needs to know of its record, in shared memory.
struct Side {
  Powers powers;
  OneTimeKey one_time;
  // Each by itself in 16 bytes or more, so that no wide load reaches into a neighbour.
  alignas(16) u32 key[8];
  alignas(16) u32 associated_words[kAssociatedBytes / 4];  // the header and the group's context
  alignas(16) Number associated;                           // their hash
  alignas(16) u32 header_tag[4];
  alignas(16) u32 tail[16];  // ciphertext past the last whole block, padded with zeros
};

struct Shared {
  Side side[2];  // in, out
  Number warp_sum[kWarps];
  Number part_sum;
  u32 plain_tail[16];
  u32 header_good;
  u32 proceed;
};

struct Place {
  u64 record;
  u64 start;  // of the payload in the tensor
  u32 bytes;
  int blocks;       // whole 64-byte blocks
  u32 tail;         // bytes after the last
  int first_place;  // of this part; negative where places in front of the first block are empty
  int first_turn;   // the first one that has blocks
  int turns;
  u32 part, parts;
};

__device__ __forceinline__ Place place_of(const Launch& launch) {
  Place at;
  at.part = part_of_record();
  at.parts = parts_of_record();
  at.record = blockIdx.x / at.parts;
  at.start = at.record * launch.record_bytes;
  const u64 left = launch.bytes - at.start;
  at.bytes = left < launch.record_bytes ? (u32)left : launch.record_bytes;
  at.blocks = at.bytes / 64;
  at.tail = at.bytes % 64;
  at.turns = 1 << launch.log_turns;
  const int part_blocks = kThreads << launch.log_turns;
  at.first_place = ((int)at.part - (int)at.parts) * part_blocks + at.blocks;
  const int idle = at.first_place < 0 ? -at.first_place / kThreads : 0;
  at.first_turn = idle < at.turns ? idle : at.turns;
  return at;
}

__device__ __forceinline__ u8* record_at(const Launch& launch, const Wire& wire, const Place& at) {
  return wire.records + at.record * ((u64)launch.record_bytes + kOverhead);
}

__device__ __forceinline__ u64 count_of(const Wire& wire, const Place& at) {
  return (wire.header[2] | (u64)wire.header[3] << 32) + at.record;
}

__device__ __forceinline__ Nonce nonce_of(const Wire& wire, const Place& at, u32 lane_bit) {
  const u64 count = count_of(wire, at);
  return {{wire.header[4] | lane_bit, (u32)count, (u32)(count >> 32)}};
}

__device__ __forceinline__ u32 header_word(const Wire& wire, const Place& at, u32 i) {
  const u64 count = count_of(wire, at);
  switch (i) {
    case 1: return at.bytes;
    case 2: return (u32)count;
    case 3: return (u32)(count >> 32);
    case 12: return wire.header[12] + (u32)at.record;
    default: return wire.header[i];
  }
}

// One code for the blocks that only set-up needs, so that it stays out of the loops' way.
__device__ __noinline__ void slow_keystream(const u32* key, u32 counter, u32 n0, u32 n1, u32 n2,
                                            u32 one, u32* out) {
  u32 x[16];
  keystream<1>([&](u32(&words)[8]) {
    for (int i = 0; i < 8; ++i) words[i] = key[i];
  }, counter, {{n0, n1, n2}}, one, x);
  for (int i = 0; i < 16; ++i) out[i] = x[i];
}

__device__ __noinline__ OneTimeKey slow_one_time_key(const u32* key, const Nonce& nonce, u32 one) {
  return one_time_key([&](u32(&words)[8]) {
    for (int i = 0; i < 8; ++i) words[i] = key[i];
  }, nonce, one);
}

__device__ __noinline__ Number hash_associated(const Side& side, const Factor& r) {
  return absorb_padded(Number{}, r, kAssociatedBytes,
                       [&](u32 i) { return side.associated_words[i]; });
}

// By one warp of every part.
__device__ __noinline__ void prepare_powers(const Launch& launch, const Wire& wire, const Place& at,
                                            Side& side) {
  if (threadIdx.x % kLanes == 0) {
    side.one_time = slow_one_time_key(side.key, nonce_of(wire, at, 0), launch.one);
    // What a short record does not need is not made.
    int last = at.parts > 1 ? next_part(launch.log_turns) : kNextWarp;
    if (at.turns > 1 && last < kNextTurn) last = kNextTurn;
    if (at.turns > kGroup && last < kNextGroup) last = kNextGroup;
    make_powers(side.one_time.r, last + 1, side.powers);
  }
  __syncwarp();
  if (at.turns > 1) make_weights(threadIdx.x % kLanes, kLanes, side.powers);
}

// By one thread of every part, any of which may have the first block: what stands in front of it.
__device__ __noinline__ void prepare_associated(const Launch& launch, const Wire& wire,
                                                const Place& at, Side& side) {
  const OneTimeKey key = slow_one_time_key(side.key, nonce_of(wire, at, 0), launch.one);
  side.associated = hash_associated(side, key.r);
}

// By one thread of part 0: the tag of the header we expect or send.
__device__ __noinline__ void prepare_header(const Launch& launch, const Wire& wire, const Place& at,
                                            Side& side) {
  const OneTimeKey key = slow_one_time_key(side.key, nonce_of(wire, at, kHeaderLane), launch.one);
  const Tag tag = tag_of(hash_associated(side, key.r), key, kAssociatedBytes, 0);
  for (int i = 0; i < 4; ++i) side.header_tag[i] = tag.word[i];
}

__device__ __noinline__ bool header_on_wire_is(const Side& side, const u8* record) {
  const u32* const words = reinterpret_cast<const u32*>(record);
  u32 different = 0;
  for (u32 i = 0; i < 16; ++i) different |= words[i] ^ side.associated_words[i];
  for (u32 i = 0; i < 4; ++i) different |= words[16 + i] ^ side.header_tag[i];
  return different == 0;
}

// Ciphertext past the last whole block, and its plaintext.
__device__ __noinline__ void open_tail(const Launch& launch, const Place& at, const u8* record,
                                       Shared& shared) {
  Side& side = shared.side[0];
  const Nonce nonce = nonce_of(launch.in, at, 0);
  load_tail(record + kPayloadAt + (u64)at.blocks * 64, at.tail, side.tail);
  slow_keystream(side.key, at.blocks + 1, nonce.word[0], nonce.word[1], nonce.word[2],
                 launch.one, shared.plain_tail);
  for (int i = 0; i < 16; ++i) shared.plain_tail[i] ^= side.tail[i];
}

// The sum of all threads' numbers, each weighed by its place, in `part_sum`. Called by all.
__device__ __forceinline__ void sum_part(Number sum, const Powers& powers, Shared& shared) {
#pragma unroll 1
  for (int level = 0; level < kNextWarp; ++level) {
    Number next;
#pragma unroll
    for (int i = 0; i < 5; ++i) next.limb[i] = __shfl_down_sync(~0u, sum.limb[i], 1 << level);
    sum = joined(sum, powers.doubling[level], next);
  }
  if (threadIdx.x % kLanes == 0) shared.warp_sum[threadIdx.x / kLanes] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
#pragma unroll 1
    for (int warp = 1; warp < kWarps; ++warp) {
      sum = joined(sum, powers.doubling[kNextWarp], shared.warp_sum[warp]);
    }
    shared.part_sum = sum;
  }
}

// By one thread of part 0, after all parts' sums are there.
__device__ __noinline__ Tag finish_tag(const Launch& launch, const Place& at, const Side& side,
                                       const Shared& shared) {
  Number h = side.associated;
  if (at.blocks > 0) {
    h = shared.part_sum;
#pragma unroll 1
    for (u32 part = 1; part < at.parts; ++part) {
      h = joined(h, side.powers.doubling[next_part(launch.log_turns)], remote(shared.part_sum, part));
    }
  }
  h = absorb_padded(h, side.one_time.r, at.tail, [&](u32 i) { return side.tail[i]; });
  return tag_of(h, side.one_time, kAssociatedBytes, at.bytes);
}

// What a thread has of the polynomial: a number, and the products of the group of turns under way.
struct Partial {
  Number sum = {};
  Columns columns = {};
};

// Adds the block of this turn, which may be missing; `cipher` are its words.
__device__ __forceinline__ void absorb_block(Partial& partial, const Place& at, int turn, int block,
                                             const u32 (&cipher)[16], const Side& side) {
  const int to_come = (at.turns - 1 - turn) % kGroup;  // turns of this group
  const Factor(&weight)[4] = side.powers.weight[to_come];
  if (block >= 0) {
    add_block(partial.columns, cipher, [&](int i) { return fetch(weight[i]); });
    if (block == 0) add_product(partial.columns, side.associated, fetch(weight[3]));
  }
  if (to_come == 0) {
    if (turn >= kGroup) {
      add_product(partial.columns, partial.sum, fetch(side.powers.doubling[kNextGroup]));
    }
    partial.sum = carried(partial.columns);
    partial.columns = {};
  }
}

__device__ __forceinline__ void block_keystream(const Side& side, int block, const Nonce& nonce,
                                                u32 one, u32 (&x)[16]) {
  keystream<SEALRING_ROUNDS>([&](u32(&words)[8]) {
    fetch4(side.key, words);
    fetch4(side.key + 4, words + 4);
  }, (u32)block + 1, nonce, one, x);
}

// Checks the record; true if all of it is authentic. Called by all threads of all parts.
__device__ __forceinline__ bool authentic(const Launch& launch, const Place& at, const u8* record,
                                          Shared& shared) {
  const Side& side = shared.side[0];
  Partial partial;
#pragma unroll 1
  for (int turn = at.first_turn; turn < at.turns; ++turn) {
    const int block = at.first_place + turn * kThreads + (int)threadIdx.x;
    u32 cipher[16] = {};
    if (block >= 0) load(record + kPayloadAt + (u64)block * 64, true, cipher);
    absorb_block(partial, at, turn, block, cipher, side);
  }
  sum_part(partial.sum, side.powers, shared);
  meet();
  if (at.part == 0 && threadIdx.x == 0) {
    const Tag tag = finish_tag(launch, at, side, shared);
    const bool good = same(tag, tag_on_wire(record + kPayloadAt + at.bytes)) && shared.header_good;
    if (!good) *launch.failed = at.record;
    shared.proceed = good;
  }
  meet();
  return remote(shared.proceed, 0) != 0;
}

template <bool opens, bool seals>
__device__ __forceinline__ void prepare(const Launch& launch, const Place& at, const u8* in,
                                        Shared& shared) {
  const u32 t = threadIdx.x, warp = t / kLanes, lane = t % kLanes;
  if (warp < 2 && (warp == 0 ? opens : seals)) {
    const Wire& wire = warp == 0 ? launch.in : launch.out;
    Side& side = shared.side[warp];
    if (lane < kAssociatedBytes / 4) {
      side.associated_words[lane] =
          lane < 16 ? header_word(wire, at, lane) : launch.context[lane - 16];
    } else {
      side.key[lane - 24] = wire.key[lane - 24];
    }
  }
  __syncthreads();
  // Who does what: with one direction a warp each, with two directions two warps each.
  constexpr bool both = opens && seals;
  const u32 which = both ? warp / 2 : (seals ? 1 : 0);
  const u32 task = both ? warp % 2 : warp;
  const Wire& wire = which == 0 ? launch.in : launch.out;
  Side& side = shared.side[which];
  if (task == 0) prepare_powers(launch, wire, at, side);
  if (lane == 0) {
    if (task == 1) prepare_associated(launch, wire, at, side);
    if (at.part == 0 && task == (both ? 1 : 2)) {
      prepare_header(launch, wire, at, side);
      if (opens && which == 0) shared.header_good = header_on_wire_is(side, in);
    }
    if (opens && which == 0 && at.part == 0 && task == 1 && at.tail) {
      open_tail(launch, at, in, shared);
    }
  }
  __syncthreads();
}

template <bool opens, bool seals, bool reduces>
__device__ __forceinline__ void run(const Launch& launch) {
  __shared__ Shared shared;
  const Place at = place_of(launch);
  const u32 t = threadIdx.x;
  const u8* const in = record_at(launch, launch.in, at);
  u8* const out = record_at(launch, launch.out, at);
  const u8* const local = launch.local + at.start;
  u8* const result = launch.result + at.start;
  const u64 tail_at = (u64)at.blocks * 64;
  const bool keeps = opens && launch.result != nullptr;

  prepare<opens, seals>(launch, at, in, shared);

  bool proceed = true;
  if constexpr (opens) proceed = authentic(launch, at, in, shared);

  const bool local_aligned = is_aligned(local), result_aligned = is_aligned(result);
  const Nonce nonce_in = opens ? nonce_of(launch.in, at, 0) : Nonce{};
  const Nonce nonce_out = seals ? nonce_of(launch.out, at, 0) : Nonce{};
  Partial partial;
  if (proceed) {
#pragma unroll 1
    for (int turn = at.first_turn; turn < at.turns; ++turn) {
      const int block = at.first_place + turn * kThreads + (int)t;
      const u64 offset = (u64)block * 64;
      u32 plain[16] = {}, x[16];
      if (block >= 0) load(opens ? in + kPayloadAt + offset : local + offset, opens || local_aligned, plain);
      if constexpr (opens) {
        block_keystream(shared.side[0], block, nonce_in, launch.one, x);
#pragma unroll
        for (int i = 0; i < 16; ++i) plain[i] ^= x[i];
#if SEALRING_REDUCES
        if (reduces && block >= 0) {
          u32 ours[16];
          load(local + offset, local_aligned, ours);
          sealring::reduce::combine_block(ours, plain);
#pragma unroll
          for (int i = 0; i < 16; ++i) plain[i] = ours[i];
        }
#endif
        if (keeps && block >= 0) store(result + offset, result_aligned, plain);
      }
      if constexpr (seals) {
        block_keystream(shared.side[1], block, nonce_out, launch.one, x);
#pragma unroll
        for (int i = 0; i < 16; ++i) x[i] ^= plain[i];
        if (block >= 0) store(out + kPayloadAt + offset, true, x);
        absorb_block(partial, at, turn, block, x, shared.side[1]);
      }
    }
    if (at.part == 0 && t == kLanes && at.tail != 0) {
      u32 plain[16];
      if (reduces || !opens) load_tail(local + tail_at, at.tail, plain);
#if SEALRING_REDUCES
      if (reduces) sealring::reduce::combine_block(plain, shared.plain_tail);
#endif
      if (opens && !reduces) {
        for (int i = 0; i < 16; ++i) plain[i] = shared.plain_tail[i];
      }
      if (keeps) store_bytes(result + tail_at, at.tail, plain);
      if constexpr (seals) {
        u32* const tail = shared.side[1].tail;
        slow_keystream(shared.side[1].key, at.blocks + 1, nonce_out.word[0], nonce_out.word[1],
                       nonce_out.word[2], launch.one, tail);
        for (u32 i = 0; i < 16; ++i) tail[i] = (tail[i] ^ plain[i]) & kept_of_word(i, at.tail);
        store_bytes(out + kPayloadAt + tail_at, at.tail, tail);
      }
    }
  }
  if constexpr (seals) {
    Side& side = shared.side[1];
    sum_part(partial.sum, side.powers, shared);
    meet();
    if (at.part == 0 && proceed) {
      if (t == 0) store_tag(out + kPayloadAt + at.bytes, finish_tag(launch, at, side, shared));
      if (t >= kLanes && t < kLanes + kPayloadAt / 4) {
        const u32 i = t - kLanes;
        reinterpret_cast<u32*>(out)[i] = i < 16 ? side.associated_words[i] : side.header_tag[i - 16];
      }
    }
  }
  // No part may leave while another reads its memory.
  if (at.parts > 1) meet();
}

}  // namespace

#if SEALRING_REDUCES

extern "C" __global__ void __launch_bounds__(kThreads, SEALRING_BLOCKS)
    open_reduce(const __grid_constant__ Launch launch) {
  run<true, false, true>(launch);
}

extern "C" __global__ void __launch_bounds__(kThreads, SEALRING_BLOCKS)
    hop(const __grid_constant__ Launch launch) {
  run<true, true, true>(launch);
}

// ---- What a program computes between its messages ----------------------------------------------

namespace {

using sealring::reduce::Element;

template <class Function>
__device__ __forceinline__ void each(u64 bytes, Function function) {
  const u64 step = (u64)gridDim.x * blockDim.x;
  for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < bytes / sizeof(Element); i += step) {
    function(i);
  }
}

}  // namespace

extern "C" __global__ void reduce(Element* dst, const Element* src, u64 bytes) {
  each(bytes, [&](u64 i) { dst[i] = sealring::reduce::combine(dst[i], src[i]); });
}

extern "C" __global__ void average(Element* dst, u64 bytes, u32 world) {
  each(bytes, [&](u64 i) { dst[i] = sealring::reduce::divide(dst[i], world); });
}

extern "C" __global__ void premultiply(Element* dst, u64 bytes, double factor) {
  each(bytes, [&](u64 i) { dst[i] = sealring::reduce::scale(dst[i], factor); });
}

#else

extern "C" __global__ void __launch_bounds__(kThreads, SEALRING_BLOCKS)
    seal(const __grid_constant__ Launch launch) {
  run<false, true, false>(launch);
}

extern "C" __global__ void __launch_bounds__(kThreads, SEALRING_BLOCKS)
    open(const __grid_constant__ Launch launch) {
  run<true, false, false>(launch);
}

#endif
