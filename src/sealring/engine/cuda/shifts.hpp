// Shifts: kernels that are launched before it is known what they will do.
//
// Whoever calls a collective launches as many as it can need, each behind a wait for its number, and
// goes on. The group's thread then writes batches of commands into host memory and counts up; it
// makes no call of CUDA's, so nothing that other threads do with the driver can stop it, nor a
// stream that waits for the collective. A shift whose number comes without a batch has nothing to do.
#pragma once

#include "gpu_record.hpp"
#include "plain_elements.hpp"

namespace {

// ---- What the host writes (native/gpu_launch.hpp has the same) ---------------------------------

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
  const u8* wire;  // where the records to open lie; they are copied to launch.in.records first
  u64 argument;    // a byte to fill with, a world to divide by, the bits of a factor
};

constexpr u32 kCommands = 8;

struct Batch {
  u32 number;  // of the shift that it is for
  u32 count;
  u32 unused[14];
  Command commands[kCommands];
};

// The kernel's argument.
struct Shift {
  const Batch* batch;
  u32* arrived;  // blocks of threads that are done; between shifts 0
  u32* done;     // in host memory: the last shift that is
  u32 number;
  u32 blocks;  // of threads, for each command
};
static_assert(sizeof(Command) == 256 && sizeof(Batch) == 64 + kCommands * 256);
static_assert(sizeof(Shift) == 32);

// ---- One shift ---------------------------------------------------------------------------------

// Every byte is read once: what is checked and used is the copy, which only this worker can write.
__device__ __forceinline__ void fetch_record(const Command& command, const Place& at) {
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
__device__ __forceinline__ void obey(const Command& command, u32 index, u32 blocks,
                                     Shared& shared) {
  const Launch& launch = command.launch;
  switch (launch.action) {
    case kSeal:
    case kOpen:
    case kOpenReduce: {
      const u64 records =
          launch.bytes == 0 ? 1 : (launch.bytes + launch.record_bytes - 1) / launch.record_bytes;
      if (index / parts_of_record() >= records) return;  // all of a cluster, or none
      if (launch.action == kSeal) return Records::seal(launch, index, shared);
      fetch_record(command, place_of(launch, index));
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
    default:  // compiled for a collective without that
      if (launch.failed != nullptr) *launch.failed = 0;
  }
}

template <class Records>
__device__ __forceinline__ void serve_shift(const Shift& shift) {
  __shared__ Command command;
  __shared__ Shared shared;
  const volatile u32* const head = &shift.batch->number;
  if (head[0] != shift.number) return;  // all blocks, or none
  const u32 which = blockIdx.x / shift.blocks;
  if (which < head[1]) {
    const volatile u32* const words = reinterpret_cast<const u32*>(&shift.batch->commands[which]);
    for (u32 i = threadIdx.x; i < sizeof(Command) / 4; i += blockDim.x) {
      reinterpret_cast<u32*>(&command)[i] = words[i];
    }
    __syncthreads();
    obey<Records>(command, blockIdx.x % shift.blocks, shift.blocks, shared);
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  // What this block wrote is seen by whoever sees that the shift is done.
  __threadfence_system();
  if (atomicAdd(shift.arrived, 1) != gridDim.x - 1) return;
  *shift.arrived = 0;
  __threadfence_system();
  *reinterpret_cast<volatile u32*>(shift.done) = shift.number;
}

}  // namespace
