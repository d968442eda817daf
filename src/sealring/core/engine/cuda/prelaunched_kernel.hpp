// A kernel that is launched before its commands are known (native/device/cuda/prelaunched_kernels.hpp).
//
// It starts when its number has been reached, and runs the batch of that number. If there is no such batch,
// it returns at once.
#pragma once

#include "commands.hpp"

namespace {

template <class Records>
__device__ __forceinline__ void run_batch(const BatchArgument& argument) {
  __shared__ Command command;
  __shared__ Shared shared;
  const volatile u32* const head = &argument.batch->number;
  if (head[0] != argument.number) return;  // all blocks return here, or none
  const u32 which = blockIdx.x / argument.blocks;
  if (which < head[1]) {
    take_command(argument.batch, which, command);
    run_command<Records>(command, blockIdx.x % argument.blocks, argument.blocks, shared);
  }
  report(argument, argument.number);
}

}  // namespace
