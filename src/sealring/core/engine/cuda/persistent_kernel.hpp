// The kernel that stays on the GPU while messages are under way (native/device/cuda/persistent_kernel.hpp).
//
// It polls host memory for its next batch, less often the longer none comes, and ends when it reads kStop.
// After an acquiring load of the batch's number it sees everything that was written before, including a
// sender's tensor.
#pragma once

#include "commands.hpp"

namespace {

constexpr u32 kStop = ~0u;  // in place of a number of commands: the kernel ends
constexpr u32 kShortestPauseNs = 500, kLongestPauseNs = 8000;

__device__ __forceinline__ u32 acquired(const u32* number) {
  u32 seen;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(seen) : "l"(number) : "memory");
  return seen;
}

// Called by one thread of each block; returns how many commands the batch has.
__device__ __forceinline__ u32 await_batch(const Batch* batch, u32 number) {
  for (u32 pause = kShortestPauseNs; acquired(&batch->number) != number;) {
    __nanosleep(pause);
    if (pause < kLongestPauseNs) pause *= 2;
  }
  return *reinterpret_cast<const volatile u32*>(&batch->count);
}

template <class Records>
__device__ __forceinline__ void run_batches_until_stopped(const BatchArgument& argument) {
  __shared__ Command command;
  __shared__ Shared shared;
  __shared__ u32 in_batch;
  const u32 which = blockIdx.x / argument.blocks;
  for (u32 number = argument.number;; ++number) {
    if (threadIdx.x == 0) in_batch = await_batch(argument.batch, number);
    __syncthreads();
    const u32 commands = in_batch;
    if (commands != kStop && which < commands) {
      take_command(argument.batch, which, command);
      run_command<Records>(command, blockIdx.x % argument.blocks, argument.blocks, shared);
    }
    report(argument, number);
    if (commands == kStop) return;
  }
}

}  // namespace
