// The porter: a kernel that stays while messages are under way (native/device/cuda/persistent_kernel.hpp).
//
// It looks at host memory for its next batch, ever less often while none comes, and ends when it is
// dismissed. What others have written since the batch before, a sender's tensor too, is read anew: to
// acquire the batch's number is to see all that came before it.
#pragma once

#include "commands.hpp"

namespace {

constexpr u32 kDismissed = ~0u;  // in place of a number of commands
constexpr u32 kShortestPauseNs = 500, kLongestPauseNs = 8000;

__device__ __forceinline__ u32 acquired(const u32* number) {
  u32 seen;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(seen) : "l"(number) : "memory");
  return seen;
}

// By one thread of each block; returns how many commands there are.
__device__ __forceinline__ u32 await_batch(const Batch* batch, u32 number) {
  for (u32 pause = kShortestPauseNs; acquired(&batch->number) != number;) {
    __nanosleep(pause);
    if (pause < kLongestPauseNs) pause *= 2;
  }
  return *reinterpret_cast<const volatile u32*>(&batch->count);
}

template <class Records>
__device__ __forceinline__ void carry_until_dismissed(const Shift& shift) {
  __shared__ Command command;
  __shared__ Shared shared;
  __shared__ u32 in_batch;
  const u32 which = blockIdx.x / shift.blocks;
  for (u32 number = shift.number;; ++number) {
    if (threadIdx.x == 0) in_batch = await_batch(shift.batch, number);
    __syncthreads();
    const u32 commands = in_batch;
    if (commands != kDismissed && which < commands) {
      take_command(shift.batch, which, command);
      obey<Records>(command, blockIdx.x % shift.blocks, shift.blocks, shared);
    }
    report(shift, number);
    if (commands == kDismissed) return;
  }
}

}  // namespace
