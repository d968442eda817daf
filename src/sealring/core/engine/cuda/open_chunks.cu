// Opens chunks of sealed files (C2SP's chunked encryption with ChaCha20-Poly1305) in the GPU's memory.
//
// One thread block opens one chunk: it checks the tag and then, if the tag is good, writes the plaintext.
// Nothing of a forged chunk is written. The ciphertext must be in memory that only this worker can write.

#ifndef SEALRING_ROUNDS
#define SEALRING_ROUNDS 5
#endif

#include "gpu_record.hpp"

namespace {

constexpr u32 kChunkBytes = 16384;
constexpr u32 kLogTurns = 1;
constexpr int kTurns = 1 << kLogTurns;
static_assert(kChunkBytes / 64 == kThreads * kTurns);

// ---- What the host hands over (core/engine/cuda/chunks.py packs the same) ----------------------------------

struct Chunk {
  u64 from;  // in the ciphertext, at a multiple of 16
  u64 to;  // in the plaintext
  u64 number;  // in its file
  u32 bytes;  // of plaintext
  u32 file;  // the file whose key opens it
};

struct Opening {
  const u8* sealed;
  u8* plain;
  const Chunk* chunks;
  const u32* keys;
  u64* failed;  // gets the place in `chunks` of a chunk that is not authentic
  u32 one;
  u32 unused;
};
static_assert(sizeof(Chunk) == 32 && sizeof(Opening) == 48);

constexpr u32 kKeyEntryWords = 16;  // the key's eight words, the base nonce's three, unused ones

__device__ __forceinline__ u32 swapped(u32 word) { return __byte_perm(word, 0, 0x0123); }

// The base nonce XOR the chunk's number as a big-endian integer.
__device__ __forceinline__ Nonce chunk_nonce(const u32* base, u64 number) {
  return {{base[0], base[1] ^ swapped((u32)(number >> 32)), base[2] ^ swapped((u32)number)}};
}

__device__ __forceinline__ RecordPart whole_chunk(u32 bytes) {
  RecordPart at = {};
  at.bytes = bytes;
  at.blocks = bytes / 64;
  at.tail = bytes % 64;
  at.turns = kTurns;
  at.first_place = at.blocks - kThreads * kTurns;
  at.first_turn = at.first_place < 0 ? -at.first_place / kThreads : 0;
  if (at.first_turn > kTurns) at.first_turn = kTurns;
  at.parts = 1;
  return at;
}

__device__ __noinline__ Tag chunk_tag(const RecordPart& at, const Side& side,
                                      const Number& blocks) {
  const Number h = absorb_padded(at.blocks > 0 ? blocks : Number{}, side.one_time.r, at.tail,
                                 [&](u32 i) { return side.tail[i]; });
  return tag_of(h, side.one_time, 0, at.bytes);
}

__device__ __noinline__ void prepare_chunk(const RecordPart& at, const u8* cipher,
                                           const Nonce& nonce, u32 one, Shared& shared) {
  Side& side = shared.side[0];
  const u32 warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  if (warp == 0) {
    if (lane == 0) {
      side.one_time = slow_one_time_key(side.key, nonce, one);
      make_powers(side.one_time.r, kNextTurn + 1, side.powers);
    }
    __syncwarp();
    make_weights((int)lane, kLanes, side.powers);
  }
  if (warp == 1 && lane == 0 && at.tail != 0) {
    load_tail(cipher + (u64)at.blocks * 64, at.tail, side.tail);
    slow_keystream(side.key, at.blocks + 1, nonce.word[0], nonce.word[1], nonce.word[2], one,
                   shared.plain_tail);
    for (int i = 0; i < 16; ++i) shared.plain_tail[i] ^= side.tail[i];
  }
  __syncthreads();
}

__device__ __forceinline__ bool chunk_is_authentic(const RecordPart& at, const u8* cipher,
                                                   Shared& shared) {
  const Side& side = shared.side[0];
  Partial partial;
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    const int block = at.first_place + turn * kThreads + (int)threadIdx.x;
    u32 words[16] = {};
    if (block >= 0) load(cipher + (u64)block * 64, true, words);
    absorb_block(partial, at, turn, block, words, side);
  }
  sum_part(partial.sum, side.powers, shared);
  if (threadIdx.x == 0) {
    const Tag tag = chunk_tag(at, side, shared.part_sum);
    shared.proceed = verdict(same(tag, tag_on_wire(cipher + at.bytes)));
  }
  __syncthreads();
  return shared.proceed != 0;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 8)
    open_chunks(const __grid_constant__ Opening opening) {
  __shared__ Shared shared;
  const Chunk& chunk = opening.chunks[blockIdx.x];
  const RecordPart at = whole_chunk(chunk.bytes);
  const u32* const entry = opening.keys + (u64)chunk.file * kKeyEntryWords;
  const u8* const cipher = opening.sealed + chunk.from;
  u8* const plain = opening.plain + chunk.to;
  const Nonce nonce = chunk_nonce(entry + 8, chunk.number);
  Side& side = shared.side[0];
  if (threadIdx.x < 8) side.key[threadIdx.x] = entry[threadIdx.x];
  if (threadIdx.x == 0) side.associated = Number{};  // chunks have no associated data
  __syncthreads();

  prepare_chunk(at, cipher, nonce, opening.one, shared);
  if (!chunk_is_authentic(at, cipher, shared)) {
    if (threadIdx.x == 0) *opening.failed = blockIdx.x;
    return;
  }

  const bool aligned = is_aligned(plain);
#pragma unroll 1
  for (int turn = at.first_turn; turn < kTurns; ++turn) {
    const int block = at.first_place + turn * kThreads + (int)threadIdx.x;
    if (block < 0) continue;
    u32 words[16], x[16];
    load(cipher + (u64)block * 64, true, words);
    block_keystream(side, block, nonce, opening.one, x);
#pragma unroll
    for (int i = 0; i < 16; ++i) words[i] ^= x[i];
    store(plain + (u64)block * 64, aligned, words);
  }
  if (threadIdx.x == 0 && at.tail != 0) {
    store_bytes(plain + (u64)at.blocks * 64, at.tail, shared.plain_tail);
  }
}
