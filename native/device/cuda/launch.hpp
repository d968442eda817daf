// The arguments of a GPU's kernels: the structs of engine/cuda/gpu_record.hpp and commands.hpp.
#pragma once

#include <cstdint>

#include "device/cuda/driver.hpp"
#include "device/device.hpp"
#include "record/record.hpp"

namespace sealring::gpu {

struct Wire {
  cuda::Pointer records;
  cuda::Pointer key;
  uint8_t header[kHeaderBytes];
};

enum class Action : uint32_t { seal, open, open_reduce, copy, fill, reduce, average, premultiply };

struct Launch {
  Wire in, out;
  cuda::Pointer local, result;
  uint64_t bytes;
  cuda::Pointer failed;
  uint8_t context[kContextBytes];
  uint32_t record_bytes;
  uint32_t log_turns;
  uint32_t one;
  Action action;
};

struct Command {
  Launch launch;
  cuda::Pointer wire;
  uint64_t argument;
};

inline constexpr uint32_t kCommands = 8;  // the most commands of one batch
// In place of a batch's number of commands: no batch follows (engine/cuda/persistent_kernel.hpp).
inline constexpr uint32_t kStop = ~0u;

struct Batch {
  uint32_t number;
  uint32_t count;
  uint32_t unused[14];
  Command commands[kCommands];
};

struct BatchArgument {
  cuda::Pointer batch;
  cuda::Pointer arrived;
  cuda::Pointer done;
  uint32_t number;
  uint32_t blocks;
};

static_assert(sizeof(Wire) == 80 && sizeof(Launch) == 240 && sizeof(Command) == 256);
static_assert(sizeof(Batch) == 64 + kCommands * 256 && sizeof(BatchArgument) == 32);

inline constexpr uint32_t kThreads = 128;
inline constexpr uint32_t kMaxParts =
    8;  // clusters that every GPU of compute capability 9.0 can launch

// How many thread blocks share one record: about one for 32 KiB. A record must not take long, because few are
// under way at a time.
uint32_t parts_of(size_t record_bytes);
// How many turns a part's threads take, as a power of two.
uint32_t log_turns_of(size_t record_bytes, uint32_t parts);

// A group's keys in the GPU's memory, and one more slot after them.
struct KeyTable {
  cuda::Pointer at = 0;
  int slots = 0;
  cuda::Pointer of(int slot) const { return at + static_cast<size_t>(slot) * kKeyBytes; }
  size_t bytes() const { return static_cast<size_t>(slots + 1) * kKeyBytes; }
};

// What a GPU's command queue needs to know about the GPU.
struct Gpu {
  const cuda::Driver& driver;
  cuda::Handle context;
  KeyTable keys;
};

// The argument for a kernel that seals a run of records to `sealed`, or opens it there. The kernel reports a
// bad tag in `failed`.
Launch launch_of(const Device::Record& record, const KeyTable& keys, cuda::Pointer sealed,
                 bool opens, const uint8_t* local, uint8_t* result, uint32_t parts,
                 uint64_t* failed);

// Launches a kernel with one argument in the calling thread's context. Throws if the stream is being
// captured: the argument contains nonces, and a CUDA graph would use them again with every replay.
void launch(const cuda::Driver& driver, uint64_t function, uint32_t blocks, uint32_t threads,
            uint32_t cluster, const void* argument, cuda::Handle stream);

}  // namespace sealring::gpu
