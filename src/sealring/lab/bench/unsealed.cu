// The GPU's part of a collective without its cryptography, for `sealring bench gpu` to compare with.
// Records are as long and go the same way; their headers are authentic, because the host checks
// them; their payload is plaintext, and nothing checks it. No group can be made with these kernels.
#include "kernels.cu"

namespace {

template <bool opens, bool reduces>
__device__ __forceinline__ void pass(const Launch& launch, u32 index, Shared& shared) {
  const RecordPart at = part_at(launch, index);
  const u32 t = threadIdx.x;
  u8* const payload =
      (opens ? record_at(launch, launch.in, at) : record_at(launch, launch.out, at)) + kPayloadAt;
  const u8* const local = launch.local + at.start;
  u8* const result = launch.result + at.start;
  const bool local_aligned = is_aligned(local), result_aligned = is_aligned(result);
#pragma unroll 2
  for (int turn = at.first_turn; turn < at.turns; ++turn) {
    const int block = at.first_place + turn * kThreads + (int)t;
    if (block < 0) continue;
    const u64 offset = (u64)block * 64;
    u32 words[16];
    load(opens ? payload + offset : local + offset, opens || local_aligned, words);
#if SEALRING_REDUCES
    if (reduces) {
      u32 ours[16];
      load(local + offset, local_aligned, ours);
      sealring::reduce::combine_block(ours, words);
#pragma unroll
      for (int i = 0; i < 16; ++i) words[i] = ours[i];
    }
#endif
    store(opens ? result + offset : payload + offset, !opens || result_aligned, words);
  }
  if (at.part != 0) return;
  if (t == 0 && at.tail != 0) {
    const u64 offset = (u64)at.blocks * 64;
    u32 words[16];
    load_tail(opens ? payload + offset : local + offset, at.tail, words);
#if SEALRING_REDUCES
    if (reduces) {
      u32 ours[16];
      load_tail(local + offset, at.tail, ours);
      sealring::reduce::combine_block(ours, words);
      for (int i = 0; i < 16; ++i) words[i] = ours[i];
    }
#endif
    store_bytes(opens ? result + offset : payload + offset, at.tail, words);
  }
  if (opens) return;
  Side& side = shared.side[1];
  if (t < kAssociatedBytes / 4) {
    side.associated_words[t] = t < 16 ? header_word(launch.out, at, t) : launch.context[t - 16];
  }
  if (t < 8) side.key[t] = launch.out.key[t];
  __syncthreads();
  if (t == 0) prepare_header(launch, launch.out, at, side);
  __syncthreads();
  if (t < kPayloadAt / 4) {
    reinterpret_cast<u32*>(payload - kPayloadAt)[t] =
        t < 16 ? side.associated_words[t] : side.header_tag[t - 16];
  }
}

}  // namespace

#if SEALRING_RUNS_COMMANDS
namespace {

struct Passing {
  __device__ __forceinline__ static void seal(const Launch& launch, u32 index, Shared& shared) {
    pass<false, false>(launch, index, shared);
  }
  __device__ __forceinline__ static void open(const Launch& launch, u32 index, Shared& shared) {
    pass<true, false>(launch, index, shared);
  }
#if SEALRING_REDUCES
  __device__ __forceinline__ static void open_reduce(const Launch& launch, u32 index,
                                                     Shared& shared) {
    pass<true, true>(launch, index, shared);
  }
#endif
};

}  // namespace

extern "C" __global__ void run_one_batch_unsealed(const __grid_constant__ BatchArgument argument) {
  run_batch<Passing>(argument);
}
#elif SEALRING_REDUCES
extern "C" __global__ void open_reduce_unsealed(const __grid_constant__ Launch launch) {
  __shared__ Shared shared;
  pass<true, true>(launch, blockIdx.x, shared);
}
#else
extern "C" __global__ void seal_unsealed(const __grid_constant__ Launch launch) {
  __shared__ Shared shared;
  pass<false, false>(launch, blockIdx.x, shared);
}
extern "C" __global__ void open_unsealed(const __grid_constant__ Launch launch) {
  __shared__ Shared shared;
  pass<true, false>(launch, blockIdx.x, shared);
}
#endif
