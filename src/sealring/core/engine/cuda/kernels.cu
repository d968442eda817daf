// Kernels that seal and open records on the GPU that holds the tensor.
//
// One thread block works on a record, or several do together as a cluster; each then has a "part" of it. To
// open a record, it is read twice: first for the tag, then, if the tag is good, for everything else. A forged
// record leaves no trace. The record must therefore be in memory that only this worker can write; what comes
// from elsewhere is copied there first.
//
// The host compiles this file once with SEALRING_REDUCES 0 for `seal` and `open`, and once per element type
// and reduction for the kernels that compute. It compiles each again with SEALRING_RUNS_COMMANDS 1 for
// `run_one_batch` and `run_all_batches`, which perform all actions (prelaunched_kernel.hpp,
// persistent_kernel.hpp).

// The values that were fastest on an H200: how many double rounds are written out, and how many thread blocks
// a multiprocessor must have room for, which limits their registers.
#ifndef SEALRING_ROUNDS
#define SEALRING_ROUNDS 5
#endif
#ifndef SEALRING_BLOCKS
#define SEALRING_BLOCKS (SEALRING_REDUCES ? 7 : 8)
#endif

#include "gpu_record.hpp"
#if SEALRING_REDUCES
#include "reductions.hpp"
#endif
#include "persistent_kernel.hpp"
#include "prelaunched_kernel.hpp"

namespace {

template <bool opens, bool seals, bool reduces>
__device__ __forceinline__ void run(const Launch& launch, u32 index, Shared& shared) {
  const RecordPart at = part_at(launch, index);
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
      if (block >= 0)
        load(opens ? in + kPayloadAt + offset : local + offset, opens || local_aligned, plain);
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
        reinterpret_cast<u32*>(out)[i] =
            i < 16 ? side.associated_words[i] : side.header_tag[i - 16];
      }
    }
  }
  // No part may end while another reads its shared memory.
  if (at.parts > 1) meet();
}

}  // namespace

#if SEALRING_RUNS_COMMANDS

// ---- All of it, when the host asks for it ------------------------------------------------------

namespace {

struct Sealing {
  __device__ __forceinline__ static void seal(const Launch& launch, u32 index, Shared& shared) {
    run<false, true, false>(launch, index, shared);
  }
  __device__ __forceinline__ static void open(const Launch& launch, u32 index, Shared& shared) {
    run<true, false, false>(launch, index, shared);
  }
#if SEALRING_REDUCES
  __device__ __forceinline__ static void open_reduce(const Launch& launch, u32 index,
                                                     Shared& shared) {
    run<true, false, true>(launch, index, shared);
  }
#endif
};

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, SEALRING_BLOCKS)
    run_one_batch(const __grid_constant__ BatchArgument argument) {
  run_batch<Sealing>(argument);
}

#if !SEALRING_REDUCES
extern "C" __global__ void __launch_bounds__(kThreads, SEALRING_BLOCKS)
    run_all_batches(const __grid_constant__ BatchArgument argument) {
  run_batches_until_stopped<Sealing>(argument);
}
#endif

#elif SEALRING_REDUCES

extern "C" __global__ void __launch_bounds__(kThreads, SEALRING_BLOCKS)
    open_reduce(const __grid_constant__ Launch launch) {
  __shared__ Shared shared;
  run<true, false, true>(launch, blockIdx.x, shared);
}

extern "C" __global__ void __launch_bounds__(kThreads, SEALRING_BLOCKS)
    hop(const __grid_constant__ Launch launch) {
  __shared__ Shared shared;
  run<true, true, true>(launch, blockIdx.x, shared);
}

// ---- What a program computes between its messages ----------------------------------------------

extern "C" __global__ void reduce(Element* dst, const Element* src, u64 bytes) {
  reduce_elements(dst, src, bytes, blockIdx.x, gridDim.x);
}

extern "C" __global__ void average(Element* dst, u64 bytes, u32 world) {
  average_elements(dst, bytes, world, blockIdx.x, gridDim.x);
}

extern "C" __global__ void premultiply(Element* dst, u64 bytes, double factor) {
  premultiply_elements(dst, bytes, factor, blockIdx.x, gridDim.x);
}

#else

extern "C" __global__ void __launch_bounds__(kThreads, SEALRING_BLOCKS)
    seal(const __grid_constant__ Launch launch) {
  __shared__ Shared shared;
  run<false, true, false>(launch, blockIdx.x, shared);
}

extern "C" __global__ void __launch_bounds__(kThreads, SEALRING_BLOCKS)
    open(const __grid_constant__ Launch launch) {
  __shared__ Shared shared;
  run<true, false, false>(launch, blockIdx.x, shared);
}

#endif
