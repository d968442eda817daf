// Commands that kernels read from host memory, in batches (native/device/cuda/command_batches.hpp).
//
// A batch's commands run together, each by its own thread blocks. A prelaunched kernel runs one batch
// (prelaunched_kernel.hpp), the persistent kernel batch after batch (persistent_kernel.hpp).
#pragma once

#include "gpu_record.hpp"
#include "plain_elements.hpp"

namespace {

// ---- What the host writes (native/device/cuda/launch.hpp has the same) ---------------------------

enum Action : u32 {
  kSeal,
  kOpen,
  kOpenReduce,
  kCopy,
  kFill,
  kReduce,
  kAverage,
  kPremultiply,
};

struct Command {
  Launch launch;
  // The records to open, to be copied to launch.in.records; null if they are there already.
  const u8* wire;
  u64 argument;  // a byte to fill with, a world to divide by, the bits of a factor
};

constexpr u32 kCommands = 8;

struct Batch {
  u32 number;
  u32 count;
  u32 unused[14];
  Command commands[kCommands];
};

// The kernel's argument.
struct BatchArgument {
  const Batch* batch;
  u32* arrived;  // thread blocks that are done; 0 between batches
  u32* done;  // in host memory: the last batch that is done
  u32 number;  // of the kernel's batch, or of its first batch
  u32 blocks;  // thread blocks for each command
};
static_assert(sizeof(Command) == 256 && sizeof(Batch) == 64 + kCommands * 256);
static_assert(sizeof(BatchArgument) == 32);

// ---- One command -------------------------------------------------------------------------------

// Reads every byte of a record once into a copy that only this worker can write. The copy is checked and
// used.
__device__ __forceinline__ void fetch_record(const Command& command, const RecordPart& at) {
  const u64 from = at.record * ((u64)command.launch.record_bytes + kOverhead);
  const u8* const wire = command.wire + from;
  u8* const own = command.launch.in.records + from;
  const u32 bytes = at.bytes + kOverhead, wide = bytes / 16;
  const u32 step = at.parts * kThreads;
#pragma unroll 4
  for (u32 i = at.part * kThreads + threadIdx.x; i < wide; i += step) {
    uint4 v;
    asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(wire + 16 * (u64)i));
    reinterpret_cast<uint4*>(own)[i] = v;
  }
  const u32 rest = bytes - wide * 16;
  if (at.part == 0 && threadIdx.x < rest) {
    const u64 i = (u64)wide * 16 + threadIdx.x;
    own[i] = *reinterpret_cast<const volatile u8*>(wire + i);
  }
  meet();
}

template <class Records>
__device__ __forceinline__ void run_command(const Command& command, u32 index, u32 blocks,
                                            Shared& shared) {
  const Launch& launch = command.launch;
  switch (launch.action) {
    case kSeal:
    case kOpen:
    case kOpenReduce: {
      const u64 records =
          launch.bytes == 0 ? 1 : (launch.bytes + launch.record_bytes - 1) / launch.record_bytes;
      if (index / parts_of_record() >= records) return;  // all threads of a cluster return, or none
      if (launch.action == kSeal) return Records::seal(launch, index, shared);
      if (command.wire != nullptr) fetch_record(command, part_at(launch, index));
      if (launch.action == kOpen) return Records::open(launch, index, shared);
#if SEALRING_REDUCES
      return Records::open_reduce(launch, index, shared);
#else
      *launch.failed = 0;
      return;
#endif
    }
    case kCopy:
      return copy_bytes(launch.result, launch.local, launch.bytes, index, blocks);
    case kFill:
      return fill_bytes(launch.result, (u8)command.argument, launch.bytes, index, blocks);
#if SEALRING_REDUCES
    case kReduce:
      return reduce_elements(reinterpret_cast<Element*>(launch.result),
                             reinterpret_cast<const Element*>(launch.local), launch.bytes, index,
                             blocks);
    case kAverage:
      return average_elements(reinterpret_cast<Element*>(launch.result), launch.bytes,
                              (u32)command.argument, index, blocks);
    case kPremultiply:
      return premultiply_elements(reinterpret_cast<Element*>(launch.result), launch.bytes,
                                  __longlong_as_double((long long)command.argument), index, blocks);
#endif
    default:  // the kernel was compiled without this action
      if (launch.failed != nullptr) *launch.failed = 0;
  }
}

__device__ __forceinline__ void take_command(const Batch* batch, u32 which, Command& command) {
  const volatile u32* const words = reinterpret_cast<const u32*>(&batch->commands[which]);
  for (u32 i = threadIdx.x; i < sizeof(Command) / 4; i += blockDim.x) {
    reinterpret_cast<u32*>(&command)[i] = words[i];
  }
  __syncthreads();
}

// Called by all threads when their block has finished its part.
__device__ __forceinline__ void report(const BatchArgument& argument, u32 number) {
  __syncthreads();
  if (threadIdx.x != 0) return;
  // Makes what this block wrote visible to every thread that sees that the batch is done.
  __threadfence_system();
  if (atomicAdd(argument.arrived, 1) != gridDim.x - 1) return;
  *argument.arrived = 0;
  __threadfence_system();
  *reinterpret_cast<volatile u32*>(argument.done) = number;
}

}  // namespace
