// One record on the GPU: what the host says about it, where it is, its keys and powers, and the check of its
// tags.
#pragma once

#include "gpu_parts.hpp"

namespace {

constexpr u32 kHeaderBytes = 64, kContextBytes = 32;
constexpr u32 kPayloadAt = kHeaderBytes + kTagBytes;
constexpr u32 kOverhead = kPayloadAt + kTagBytes;
constexpr u32 kAssociatedBytes = kHeaderBytes + kContextBytes;
constexpr u32 kHeaderLane = 0x80000000;

// ---- What the host hands over (core/engine/cuda/kernels.py and native/device/cuda/cuda_device.cpp pack the same) --

// The records of one direction. Length, count and segment are those of the first record; the launch's other
// records have the following numbers.
struct Wire {
  u8* records;
  const u32* key;
  u32 header[16];
};

struct Launch {
  Wire in, out;
  const u8* local;  // what is sealed, or reduced with the received data
  u8* result;  // where the plaintext goes, if anywhere
  u64 bytes;
  u64* failed;  // gets the count of a record that is not authentic
  u32 context[8];
  u32 record_bytes;
  u32 log_turns;
  u32 one;
  u32 action;  // of a command (commands.hpp)
};
static_assert(sizeof(Wire) == 80 && sizeof(Launch) == 240);

// ---- One record --------------------------------------------------------------------------------

// The data about one direction's record, in shared memory.
struct Side {
  Powers powers;
  OneTimeKey one_time;
  // Each of these has its own aligned 16 bytes, so that no wide load reads a neighbour.
  alignas(16) u32 key[8];
  alignas(16) u32 associated_words[kAssociatedBytes / 4];  // the header and the group's context
  alignas(16) Number associated;  // their hash
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

struct RecordPart {
  u64 record;
  u64 start;  // of the payload in the tensor
  u32 bytes;
  int blocks;  // whole 64-byte blocks
  u32 tail;  // bytes after the last
  int first_place;  // of this part; negative if it has empty places before the first block
  int first_turn;  // the first turn that has blocks
  int turns;
  u32 part, parts;
};

// `index` is the thread block's number among those that work on this launch.
__device__ __forceinline__ RecordPart part_at(const Launch& launch, u32 index) {
  RecordPart at;
  at.part = part_of_record();
  at.parts = parts_of_record();
  at.record = index / at.parts;
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

__device__ __forceinline__ u8* record_at(const Launch& launch, const Wire& wire,
                                         const RecordPart& at) {
  return wire.records + at.record * ((u64)launch.record_bytes + kOverhead);
}

__device__ __forceinline__ u64 count_of(const Wire& wire, const RecordPart& at) {
  return (wire.header[2] | (u64)wire.header[3] << 32) + at.record;
}

__device__ __forceinline__ Nonce nonce_of(const Wire& wire, const RecordPart& at, u32 lane_bit) {
  const u64 count = count_of(wire, at);
  return {{wire.header[4] | lane_bit, (u32)count, (u32)(count >> 32)}};
}

__device__ __forceinline__ u32 header_word(const Wire& wire, const RecordPart& at, u32 i) {
  const u64 count = count_of(wire, at);
  switch (i) {
    case 1:
      return at.bytes;
    case 2:
      return (u32)count;
    case 3:
      return (u32)(count >> 32);
    case 12:
      return wire.header[12] + (u32)at.record;
    default:
      return wire.header[i];
  }
}

// Not inlined: keystream blocks for set-up only, kept out of the loops' code.
__device__ __noinline__ void slow_keystream(const u32* key, u32 counter, u32 n0, u32 n1, u32 n2,
                                            u32 one, u32* out) {
  u32 x[16];
  keystream<1>(
      [&](u32(&words)[8]) {
        for (int i = 0; i < 8; ++i) words[i] = key[i];
      },
      counter, {{n0, n1, n2}}, one, x);
  for (int i = 0; i < 16; ++i) out[i] = x[i];
}

__device__ __noinline__ OneTimeKey slow_one_time_key(const u32* key, const Nonce& nonce, u32 one) {
  return one_time_key(
      [&](u32(&words)[8]) {
        for (int i = 0; i < 8; ++i) words[i] = key[i];
      },
      nonce, one);
}

__device__ __noinline__ Number hash_associated(const Side& side, const Factor& r) {
  return absorb_padded(Number{}, r, kAssociatedBytes,
                       [&](u32 i) { return side.associated_words[i]; });
}

// Called by one warp of every part.
__device__ __noinline__ void prepare_powers(const Launch& launch, const Wire& wire,
                                            const RecordPart& at, Side& side) {
  if (threadIdx.x % kLanes == 0) {
    side.one_time = slow_one_time_key(side.key, nonce_of(wire, at, 0), launch.one);
    // A short record needs fewer powers.
    int last = at.parts > 1 ? next_part(launch.log_turns) : kNextWarp;
    if (at.turns > 1 && last < kNextTurn) last = kNextTurn;
    if (at.turns > kGroup && last < kNextGroup) last = kNextGroup;
    make_powers(side.one_time.r, last + 1, side.powers);
  }
  __syncwarp();
  if (at.turns > 1) make_weights(threadIdx.x % kLanes, kLanes, side.powers);
}

// Called by one thread of every part. Hashes the associated data, which comes before the first block; any
// part may have that block.
__device__ __noinline__ void prepare_associated(const Launch& launch, const Wire& wire,
                                                const RecordPart& at, Side& side) {
  const OneTimeKey key = slow_one_time_key(side.key, nonce_of(wire, at, 0), launch.one);
  side.associated = hash_associated(side, key.r);
}

// Called by one thread of part 0. Makes the tag of the header that is expected or sent.
__device__ __noinline__ void prepare_header(const Launch& launch, const Wire& wire,
                                            const RecordPart& at, Side& side) {
  const OneTimeKey key = slow_one_time_key(side.key, nonce_of(wire, at, kHeaderLane), launch.one);
  const Tag tag = tag_of(hash_associated(side, key.r), key, kAssociatedBytes, 0);
  for (int i = 0; i < 4; ++i) side.header_tag[i] = tag.word[i];
}

// Marks a result as public. Whether something is authentic is public; nothing else that depends on a key is.
// A branch on this result is allowed; tests/constant_time finds every other branch on a secret.
__device__ __forceinline__ bool verdict(bool authentic) {
  u32 known;
  asm volatile("mov.b32 %0, %1; // sealring: public" : "=r"(known) : "r"((u32)authentic));
  return known != 0;
}

__device__ __noinline__ bool header_on_wire_is(const Side& side, const u8* record) {
  const u32* const words = reinterpret_cast<const u32*>(record);
  u32 different = 0;
  for (u32 i = 0; i < 16; ++i) different |= words[i] ^ side.associated_words[i];
  for (u32 i = 0; i < 4; ++i) different |= words[16 + i] ^ side.header_tag[i];
  return verdict(different == 0);
}

// Loads the ciphertext after the last whole block, and decrypts it.
__device__ __noinline__ void open_tail(const Launch& launch, const RecordPart& at, const u8* record,
                                       Shared& shared) {
  Side& side = shared.side[0];
  const Nonce nonce = nonce_of(launch.in, at, 0);
  load_tail(record + kPayloadAt + (u64)at.blocks * 64, at.tail, side.tail);
  slow_keystream(side.key, at.blocks + 1, nonce.word[0], nonce.word[1], nonce.word[2], launch.one,
                 shared.plain_tail);
  for (int i = 0; i < 16; ++i) shared.plain_tail[i] ^= side.tail[i];
}

// Leaves the sum of all threads' numbers, each weighted by its place, in `part_sum`. Called by all threads.
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

// Called by one thread of part 0, after all parts' sums are there.
__device__ __noinline__ Tag finish_tag(const Launch& launch, const RecordPart& at, const Side& side,
                                       const Shared& shared) {
  Number h = side.associated;
  if (at.blocks > 0) {
    h = shared.part_sum;
#pragma unroll 1
    for (u32 part = 1; part < at.parts; ++part) {
      h = joined(h, side.powers.doubling[next_part(launch.log_turns)],
                 remote(shared.part_sum, part));
    }
  }
  h = absorb_padded(h, side.one_time.r, at.tail, [&](u32 i) { return side.tail[i]; });
  return tag_of(h, side.one_time, kAssociatedBytes, at.bytes);
}

// A thread's part of the polynomial: a number, and the products of the current group of turns.
struct Partial {
  Number sum = {};
  Columns columns = {};
};

// Adds this turn's block, if there is one. `cipher` holds the block's words.
__device__ __forceinline__ void absorb_block(Partial& partial, const RecordPart& at, int turn,
                                             int block, const u32 (&cipher)[16], const Side& side) {
  const int to_come = (at.turns - 1 - turn) % kGroup;  // turns left in this group
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
  keystream<SEALRING_ROUNDS>(
      [&](u32(&words)[8]) {
        fetch4(side.key, words);
        fetch4(side.key + 4, words + 4);
      },
      (u32)block + 1, nonce, one, x);
}

// Checks the record; true if all of it is authentic. Called by all threads of all parts.
__device__ __forceinline__ bool authentic(const Launch& launch, const RecordPart& at,
                                          const u8* record, Shared& shared) {
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
    const bool same_tag = verdict(same(tag, tag_on_wire(record + kPayloadAt + at.bytes)));
    const bool good = same_tag && shared.header_good;
    if (!good) *launch.failed = count_of(launch.in, at);
    shared.proceed = good;
  }
  meet();
  return remote(shared.proceed, 0) != 0;
}

template <bool opens, bool seals>
__device__ __forceinline__ void prepare(const Launch& launch, const RecordPart& at, const u8* in,
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
  // The division of work: with one direction each task has a warp; with two directions each direction has two
  // warps.
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

}  // namespace
