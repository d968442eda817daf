// Records sealed and opened by the GPU that holds the tensor.
//
// A cluster of thread blocks takes one record, each block ("part") up to 64 KiB of it. A part that
// opens reads the wire once, straight into registers, and keeps what it decrypted in shared
// memory, which nobody else can read or write. Only when the whole cluster's tag has been found
// good does a part write anything: to the tensor, or sealed again to the next wire. So the wire may
// lie in memory that others can write, and a forged record leaves no trace.
//
// The host compiles this once with SEALRING_REDUCES 0 for `seal` and `open`, and once per element
// type and reduction for `open_reduce` and `hop`.

#include "chacha20_poly1305.hpp"
#if SEALRING_REDUCES
#include "reductions.hpp"
#endif

using namespace sealring::chacha;

namespace {

constexpr u32 kHeaderBytes = 64, kTagBytes = 16, kContextBytes = 32;
constexpr u32 kPayloadAt = kHeaderBytes + kTagBytes;
constexpr u32 kOverhead = kPayloadAt + kTagBytes;
constexpr u32 kAssociatedBytes = kHeaderBytes + kContextBytes;
constexpr u32 kHeaderLane = 0x80000000;
constexpr int kSealParts = 4;  // at a time on one multiprocessor
constexpr u64 kNothingFailed = ~0ull;

// ---- What the host hands over (engine/cuda/kernels.py packs the same) ---------------------------

// A key in device memory, and the count of its next record. A launch takes its counts from here
// and moves the count on, so no two launches can use one nonce, not even replays of a graph.
struct KeySlot {
  u32 key[8];
  u64 count;
  u32 parts_done;
  u32 unused[5];
};

// The records of one direction. Of the header the host gives all but length, count and segment.
struct Wire {
  u8* records;
  KeySlot* key;
  u64 first_segment;
  u32 header[16];
};

struct Launch {
  Wire in, out;
  const u8* local;  // sealed, or reduced with what comes in
  u8* result;       // where `open` and `open_reduce` leave the plaintext
  u64 bytes;
  u64* failed;  // number of the first bad record of this collective, or kNothingFailed
  u64 first_record;
  u32 context[8];
  u32 record_bytes;
  u32 divisor;
  u32 one;
  u32 unused;
};
static_assert(sizeof(KeySlot) == 64 && sizeof(Wire) == 88 && sizeof(Launch) == 264);

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

__device__ __forceinline__ void arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ __forceinline__ void meet() { arrive(), wait(); }

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

// Volatile, so that each byte is fetched exactly once, whatever the compiler would like.
__device__ __forceinline__ void load(const u8* from, bool aligned, u32 (&to)[16]) {
  if (aligned) {
#pragma unroll
    for (int i = 0; i < 16; i += 4) {
      asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(to[i]), "=r"(to[i + 1]), "=r"(to[i + 2]), "=r"(to[i + 3])
                   : "l"(from + 4 * i));
    }
  } else {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const volatile u8* at = from + 4 * i;
      to[i] = at[0] | at[1] << 8 | at[2] << 16 | (u32)at[3] << 24;
    }
  }
}

__device__ __forceinline__ void store(u8* to, bool aligned, const u32 (&from)[16]) {
  if (aligned) {
#pragma unroll
    for (int i = 0; i < 16; i += 4) {
      *reinterpret_cast<uint4*>(to + 4 * i) = make_uint4(from[i], from[i + 1], from[i + 2], from[i + 3]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 64; ++i) to[i] = (u8)(from[i / 4] >> 8 * (i % 4));
  }
}

__device__ __forceinline__ bool is_aligned(const u8* at) { return ((u64)at & 15) == 0; }

// Fewer than 64 bytes, at any address; by one thread, once per record.
__device__ __noinline__ void load_tail(const u8* from, u32 bytes, u32* to) {
  for (u32 i = 0; i < 16; ++i) to[i] = 0;
  for (u32 i = 0; i < bytes; ++i) {
    to[i / 4] |= (u32)*reinterpret_cast<const volatile u8*>(from + i) << 8 * (i % 4);
  }
}

__device__ __noinline__ void store_tail(u8* to, u32 bytes, const u32* from) {
  for (u32 i = 0; i < bytes; ++i) to[i] = (u8)(from[i / 4] >> 8 * (i % 4));
}

// The mask of word i's bytes that belong to a tail of `bytes`.
__device__ __forceinline__ u32 kept_of_word(u32 i, u32 bytes) {
  const u32 left = bytes > 4 * i ? bytes - 4 * i : 0;
  return left >= 4 ? ~0u : (1u << 8 * left) - 1;
}

// ---- One record --------------------------------------------------------------------------------

// What one direction needs to know of its record, in the shared memory of part 0.
struct Side {
  RecordPowers powers;
  OneTimeKey one_time;
  Number associated;  // the hash of header and context
  // The header and the group's context. Aligned, so that no wide load reaches into a neighbour.
  alignas(16) u32 associated_words[kAssociatedBytes / 4];
  u32 header_tag[4];
  u32 tail[16];  // ciphertext past the last whole block, padded with zeros
};

struct Shared {
  Side side[2];  // in, out
  Number steps[2][5];  // this part's copy of r .. r^4 and of the step to the next turn
  Number first[2];     // this part's copy of `associated`
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
  int blocks;  // whole 64-byte blocks
  int empty;   // places in front of the first block
  u32 tail;    // bytes after the last
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
  at.empty = (int)at.parts * kPartBlocks - at.blocks;
  return at;
}

__device__ __forceinline__ u8* record_at(const Launch& launch, const Wire& wire, const Place& at) {
  return wire.records + at.record * ((u64)launch.record_bytes + kOverhead);
}

__device__ __forceinline__ Nonce nonce_of(const Wire& wire, const Place& at, u32 lane_bit) {
  const u64 count = *(const volatile u64*)&wire.key->count + at.record;
  return {{wire.header[4] | lane_bit, (u32)count, (u32)(count >> 32)}};
}

__device__ __forceinline__ void load_key(const Wire& wire, u32 (&key)[8]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) key[i] = wire.key->key[i];
}

__device__ __forceinline__ u32 header_word(const Wire& wire, const Place& at, u32 i) {
  const u64 count = *(const volatile u64*)&wire.key->count + at.record;
  const u64 segment = wire.first_segment + at.record;
  switch (i) {
    case 1: return at.bytes;
    case 2: return (u32)count;
    case 3: return (u32)(count >> 32);
    case 12: return (u32)segment;
    case 13: return (u32)(segment >> 32);
    default: return wire.header[i];
  }
}

// One code for the blocks that only set-up needs, so that it stays out of the loops' way.
__device__ __noinline__ void slow_keystream(const u32* key_slot, u32 counter, u32 n0, u32 n1,
                                            u32 n2, u32 one, u32* out) {
  u32 key[8], x[16];
  for (int i = 0; i < 8; ++i) key[i] = key_slot[i];
  keystream<false>(key, counter, {{n0, n1, n2}}, one, x);
  for (int i = 0; i < 16; ++i) out[i] = x[i];
}

__device__ __forceinline__ OneTimeKey slow_one_time_key(const Wire& wire, const Nonce& nonce, u32 one) {
  u32 x[16];
  slow_keystream(wire.key->key, 0, nonce.word[0], nonce.word[1], nonce.word[2], one, x);
  return {number_of(x[0] & 0x0fffffff, x[1] & 0x0ffffffc, x[2] & 0x0ffffffc, x[3] & 0x0ffffffc, 0),
          {x[4], x[5], x[6], x[7]}};
}

__device__ __noinline__ Number hash_associated(const Side& side, const Number& r) {
  return absorb_padded(Number{}, r, kAssociatedBytes,
                       [&](u32 i) { return side.associated_words[i]; });
}

// By one warp of part 0: the powers of r, and what stands in front of the ciphertext.
__device__ __noinline__ void prepare(const Launch& launch, const Wire& wire, const Place& at,
                                     Side& side) {
  const OneTimeKey key = slow_one_time_key(wire, nonce_of(wire, at, 0), launch.one);
  if (threadIdx.x % kLanes == 0) {
    side.one_time = key;
    make_powers(key.r, side.powers);
  } else if (threadIdx.x % kLanes == 1) {
    side.associated = hash_associated(side, key.r);
  }
}

// By one thread of part 0: the header we expect or send, and its tag.
__device__ __noinline__ void prepare_header(const Launch& launch, const Wire& wire, const Place& at,
                                            Side& side) {
  const OneTimeKey key = slow_one_time_key(wire, nonce_of(wire, at, kHeaderLane), launch.one);
  const Number h = hash_associated(side, key.r);
  const Tag tag = tag_of(h, key, kAssociatedBytes, 0);
  for (int i = 0; i < 4; ++i) side.header_tag[i] = tag.word[i];
}

__device__ __noinline__ bool header_on_wire_is(const Side& side, const u8* record) {
  u32 different = 0;
  for (u32 i = 0; i < 20; ++i) {
    const u32 word = *reinterpret_cast<const volatile u32*>(record + 4 * i);
    different |= word ^ (i < 16 ? side.associated_words[i] : side.header_tag[i - 16]);
  }
  return different == 0;
}

// The sum of all threads' numbers, each weighed by its place, in `part_sum`. Called by all.
__device__ __forceinline__ void sum_part(Number sum, const RecordPowers& powers, u32 part0, Shared& shared) {
#pragma unroll
  for (int level = 0; level < kNextWarp; ++level) {
    Number next;
#pragma unroll
    for (int i = 0; i < 5; ++i) next.limb[i] = __shfl_down_sync(~0u, sum.limb[i], 1 << level);
    sum = joined(sum, powers.lane_doubling[level], next);
  }
  if (threadIdx.x % kLanes == 0) shared.warp_sum[threadIdx.x / kLanes] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int warp = 1; warp < kWarps; ++warp) {
      sum = joined(sum, powers.lane_doubling[kNextWarp], shared.warp_sum[warp]);
    }
    shared.part_sum = sum;
  }
}

// By one thread of part 0, after all parts' sums are there.
__device__ __noinline__ Tag finish_tag(const Place& at, const Side& side, const Shared& shared) {
  Number h = side.associated;
  if (at.blocks > 0) {
    h = shared.part_sum;
#pragma unroll 1
    for (u32 part = 1; part < at.parts; ++part) {
      h = joined(h, side.powers.lane_doubling[kNextPart], remote(shared.part_sum, part));
    }
  }
  h = absorb_padded(h, side.one_time.r, at.tail, [&](u32 i) { return side.tail[i]; });
  return tag_of(h, side.one_time, kAssociatedBytes, at.bytes);
}

// Runs the cipher over this part's blocks and returns this thread's sum over the ciphertext.
// source(block, turn, words) fetches a block; sink(block, turn, words) takes it ciphered; ready()
// is called by all threads, after the first keystream, and makes `steps` valid.
template <bool opening, class Source, class Sink, class Ready>
__device__ __forceinline__ Number cipher(const Launch& launch, const Wire& wire, const Place& at,
                                         const Number (&steps)[5], const Number& associated,
                                         Source source, Sink sink, Ready ready) {
  u32 key[8];
  load_key(wire, key);
  const Nonce nonce = nonce_of(wire, at, 0);
  const int first_place = (int)at.part * kPartBlocks - at.empty;
  const int idle = first_place < 0 ? -first_place / kThreads : 0;
  const int first_turn = idle < kTurns ? idle : kTurns;
  Number sum = {};
  Number small[4], next_turn;
  if (first_turn == kTurns) ready();
#pragma unroll 1
  for (int turn = first_turn; turn < kTurns; ++turn) {
    const int block = first_place + turn * kThreads + (int)threadIdx.x;
    u32 words[16] = {}, x[16];
    if (block >= 0) source(block, turn, words);
    keystream(key, (u32)block + 1, nonce, launch.one, x);
    if (turn == first_turn) {
      ready();
#pragma unroll
      for (int i = 0; i < 4; ++i) small[i] = steps[i];
      next_turn = steps[4];
    }
#pragma unroll
    for (int i = 0; i < 16; ++i) x[i] ^= words[i];
    Columns columns = {};
    if (block >= 0) {
      sink(block, turn, x);
      if (block == 0) add_product(columns, associated, small[3]);
      add_block(columns, opening ? words : x, small);
    }
    add_product(columns, sum, next_turn);
    sum = carried(columns);
  }
  return sum;
}

// Copies what every thread of this part needs from part 0.
__device__ __forceinline__ void fetch_steps(Shared& shared, int side, const Place& at) {
  const u32 t = threadIdx.x;
  if (t < 25) {
    const u32 which = t / 5, limb = t % 5;
    const RecordPowers& powers = shared.side[side].powers;
    const Number& from = which < 4 ? powers.small[which] : powers.lane_doubling[kNextTurn];
    shared.steps[side][which].limb[limb] = remote(from.limb[limb], 0);
  } else if (t < 30) {
    shared.first[side].limb[t - 25] = remote(shared.side[side].associated.limb[t - 25], 0);
  }
  if (at.part != 0 && t >= 64 && t < 64 + kDoublings) {
    const u32 k = t - 64;
    Number& here = shared.side[side].powers.lane_doubling[k];
    here = remote(here, 0);
  }
}

template <bool opens, bool seals, bool reduces>
__device__ __forceinline__ void run(const Launch& launch) {
  __shared__ Shared shared;
  extern __shared__ uint4 stage[];  // plaintext of this part, if it opens: [turn][16 bytes][thread]
  const Place at = place_of(launch);
  const u32 t = threadIdx.x;
  const u32 warp = t / kLanes;
  u8* const in = record_at(launch, launch.in, at);
  u8* const out = record_at(launch, launch.out, at);
  const u8* const local = launch.local + at.start;
  u8* const result = launch.result + at.start;
  Side& in_side = shared.side[0];
  Side& out_side = shared.side[1];
  const u64 tail_at = (u64)at.blocks * 64;

  if (at.part == 0) {
    const u32 lane = t % kLanes;
    if (warp < 2 && lane < kAssociatedBytes / 4 && (warp == 0 ? opens : seals)) {
      const Wire& wire = warp == 0 ? launch.in : launch.out;
      shared.side[warp].associated_words[lane] =
          lane < 16 ? header_word(wire, at, lane) : launch.context[lane - 16];
    }
    __syncthreads();
    if (warp == 0) {
      if (t == 0) shared.proceed = *(volatile u64*)launch.failed == kNothingFailed;
      if constexpr (opens) prepare(launch, launch.in, at, in_side);
      else prepare(launch, launch.out, at, out_side);
    } else if (warp == 1 && opens) {
      if (t == kLanes) {
        prepare_header(launch, launch.in, at, in_side);
        shared.header_good = header_on_wire_is(in_side, in);
        if (at.tail) {
          load_tail(in + kPayloadAt + tail_at, at.tail, in_side.tail);
          const Nonce nonce = nonce_of(launch.in, at, 0);
          slow_keystream(launch.in.key->key, at.blocks + 1, nonce.word[0], nonce.word[1],
                         nonce.word[2], launch.one, shared.plain_tail);
          for (int i = 0; i < 16; ++i) shared.plain_tail[i] ^= in_side.tail[i];
        }
      }
    } else if (warp == 2 && opens && seals) {
      prepare(launch, launch.out, at, out_side);
    } else if (warp == 3 && seals) {
      if (t == 3 * kLanes) prepare_header(launch, launch.out, at, out_side);
    }
    __syncwarp();
  }
  arrive();

  bool proceed = true;
  if constexpr (opens) {
    const Number sum = cipher<true>(
        launch, launch.in, at, shared.steps[0], shared.first[0],
        [&](int block, int, u32(&words)[16]) { load(in + kPayloadAt + (u64)block * 64, true, words); },
        [&](int, int turn, const u32(&words)[16]) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            stage[(turn * 4 + i) * kThreads + t] =
                make_uint4(words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]);
          }
        },
        [&] {
          wait();
          fetch_steps(shared, 0, at);
          if constexpr (seals) fetch_steps(shared, 1, at);
          __syncthreads();
        });
    sum_part(sum, in_side.powers, at.part, shared);
    meet();
    if (at.part == 0 && t == 0) {
      const Tag tag = finish_tag(at, in_side, shared);
      Tag on_wire;
      u32 words[16];
      load_tail(in + kPayloadAt + at.bytes, kTagBytes, words);
      for (int i = 0; i < 4; ++i) on_wire.word[i] = words[i];
      const bool good = same(tag, on_wire) && shared.header_good;
      if (!good) atomicMin(launch.failed, launch.first_record + at.record);
      shared.proceed = shared.proceed && good;
    }
    meet();
    proceed = remote(shared.proceed, 0);
  }

  // The plaintext as it is to go on: ours, theirs, or the two combined.
  const bool local_aligned = is_aligned(local), result_aligned = is_aligned(result);
  const auto plain = [&](int block, int turn, u32(&words)[16]) {
    if constexpr (opens) {
      u32 opened[16];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint4 v = stage[(turn * 4 + i) * kThreads + t];
        opened[4 * i] = v.x, opened[4 * i + 1] = v.y, opened[4 * i + 2] = v.z, opened[4 * i + 3] = v.w;
      }
#if SEALRING_REDUCES
      load(local + (u64)block * 64, local_aligned, words);
      sealring::reduce::combine_block(words, opened, launch.divisor);
#else
#pragma unroll
      for (int i = 0; i < 16; ++i) words[i] = opened[i];
#endif
    } else {
      load(local + (u64)block * 64, local_aligned, words);
    }
  };
  u32 plain_tail[16];
  const bool has_tail = at.part == 0 && t == kLanes && at.tail != 0;
  if (has_tail && proceed) {
    if constexpr (reduces || !opens) load_tail(local + tail_at, at.tail, plain_tail);
#if SEALRING_REDUCES
    sealring::reduce::combine_block(plain_tail, shared.plain_tail, launch.divisor);
#else
    if constexpr (opens) {
      for (int i = 0; i < 16; ++i) plain_tail[i] = shared.plain_tail[i];
    }
#endif
  }

  if constexpr (seals) {
    Number sum = {};
    if (proceed) {
      sum = cipher<false>(
          launch, launch.out, at, shared.steps[1], shared.first[1], plain,
          [&](int block, int, const u32(&words)[16]) { store(out + kPayloadAt + (u64)block * 64, true, words); },
          [&] {
            if constexpr (!opens) {
              wait();
              fetch_steps(shared, 1, at);
              __syncthreads();
            }
          });
      if (has_tail) {
        const Nonce nonce = nonce_of(launch.out, at, 0);
        slow_keystream(launch.out.key->key, at.blocks + 1, nonce.word[0], nonce.word[1],
                       nonce.word[2], launch.one, out_side.tail);
        for (u32 i = 0; i < 16; ++i) {
          out_side.tail[i] = (out_side.tail[i] ^ plain_tail[i]) & kept_of_word(i, at.tail);
        }
        store_tail(out + kPayloadAt + tail_at, at.tail, out_side.tail);
      }
    }
    sum_part(sum, out_side.powers, at.part, shared);
    meet();
    if (at.part == 0 && t == 0 && shared.proceed) {
      const Tag tag = finish_tag(at, out_side, shared);
      store_tail(out + kPayloadAt + at.bytes, kTagBytes, tag.word);
      store_tail(out, kHeaderBytes, out_side.associated_words);
      store_tail(out + kHeaderBytes, kTagBytes, out_side.header_tag);
    }
  } else if (proceed) {
    const int first_place = (int)at.part * kPartBlocks - at.empty;
#pragma unroll 2
    for (int turn = 0; turn < kTurns; ++turn) {
      const int block = first_place + turn * kThreads + (int)t;
      if (block < 0) continue;
      u32 words[16];
      plain(block, turn, words);
      store(result + (u64)block * 64, result_aligned, words);
    }
    if (has_tail) store_tail(result + tail_at, at.tail, plain_tail);
  }

  // No part may leave while another reads its memory; and counts move on when all have used them.
  meet();
  if (t == 0) {
    const auto advance = [&](KeySlot* key) {
      if (atomicAdd(&key->parts_done, 1) == gridDim.x - 1) {
        key->parts_done = 0;
        key->count += gridDim.x / at.parts;
      }
    };
    if constexpr (opens) advance(launch.in.key);
    if constexpr (seals) advance(launch.out.key);
  }
}

}  // namespace

#if SEALRING_REDUCES
extern "C" __global__ void __launch_bounds__(kThreads, 3) open_reduce(const __grid_constant__ Launch launch) {
  run<true, false, true>(launch);
}
extern "C" __global__ void __launch_bounds__(kThreads, 3) hop(const __grid_constant__ Launch launch) {
  run<true, true, true>(launch);
}
#else
extern "C" __global__ void __launch_bounds__(kThreads, kSealParts) seal(const __grid_constant__ Launch launch) {
  run<false, true, false>(launch);
}
extern "C" __global__ void __launch_bounds__(kThreads, 3) open(const __grid_constant__ Launch launch) {
  run<true, false, false>(launch);
}
#endif
