// Shifts: kernels that are launched before it is known what they will do.
//
// Whoever calls a collective launches as many as it can need, each behind a wait for its number, and
// goes on. The group's thread then writes batches of commands into host memory and counts up; it
// makes no call of CUDA's, so nothing that other threads do with the driver can stop it, nor a
// stream that waits for the collective. A shift whose number comes without a batch has nothing to do.
#pragma once

#include "commands.hpp"

namespace {

template <class Records>
__device__ __forceinline__ void serve_shift(const Shift& shift) {
  __shared__ Command command;
  __shared__ Shared shared;
  const volatile u32* const head = &shift.batch->number;
  if (head[0] != shift.number) return;  // all blocks, or none
  const u32 which = blockIdx.x / shift.blocks;
  if (which < head[1]) {
    take_command(shift.batch, which, command);
    obey<Records>(command, blockIdx.x % shift.blocks, shift.blocks, shared);
  }
  report(shift, shift.number);
}

}  // namespace
