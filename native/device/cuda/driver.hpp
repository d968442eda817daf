// The functions of CUDA's driver that the engine calls, looked up at run time: sealring builds and works on
// machines without CUDA. Types and numbers are those of cuda.h.
#pragma once

#include <cstddef>
#include <cstdint>

namespace sealring::nccl {
struct Library;
}

namespace sealring::cuda {

using Result = int;
using Pointer = unsigned long long;  // CUdeviceptr
using Handle = void*;  // contexts, streams, events, functions

inline Pointer address(const void* memory) { return reinterpret_cast<Pointer>(memory); }

constexpr Result kSuccess = 0, kNotReady = 600;
constexpr unsigned kNonBlocking = 1;  // CU_STREAM_NON_BLOCKING
constexpr unsigned kDisableTiming = 2;  // CU_EVENT_DISABLE_TIMING
constexpr unsigned kPortable = 1;  // CU_MEMHOSTALLOC_PORTABLE
constexpr unsigned kLazyPeerAccess = 1;  // CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
constexpr int kClusterDimension = 4;  // CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
constexpr unsigned kNotBefore = 0;  // CU_STREAM_WAIT_VALUE_GEQ
constexpr unsigned kInOrder = 0;  // CU_STREAM_WRITE_VALUE_DEFAULT
constexpr int kEagerLoading = 1;  // CU_MODULE_EAGER_LOADING

struct alignas(8) LaunchAttribute {
  int id;
  char unused[4];
  union {
    struct {
      unsigned x, y, z;
    } cluster;
    char room[64];
  };
};

struct LaunchConfig {
  unsigned grid[3];
  unsigned block[3];
  unsigned shared_bytes;
  Handle stream;
  LaunchAttribute* attributes;
  unsigned attribute_count;
};

struct IpcHandle {
  char bytes[64];
};

struct Driver {
  Result (*init)(unsigned);
  Result (*retain_primary)(Handle*, int);
  Result (*release_primary)(int);
  Result (*set_current)(Handle);
  Result (*priority_range)(int*, int*);
  Result (*create_stream)(Handle*, unsigned, int);
  Result (*destroy_stream)(Handle);
  Result (*synchronize)(Handle);
  Result (*query_stream)(Handle);
  Result (*capture_status)(Handle, int*);  // 0: work put on the stream runs and is not captured
  Result (*wait_event)(Handle, Handle, unsigned);
  Result (*create_event)(Handle*, unsigned);
  Result (*destroy_event)(Handle);
  Result (*record_event)(Handle, Handle);
  Result (*query_event)(Handle);
  Result (*allocate)(Pointer*, size_t);
  Result (*release)(Pointer);
  // Allocate and free in one stream's order, without waiting for other streams.
  Result (*allocate_in)(Pointer*, size_t, Handle);
  Result (*release_in)(Pointer, Handle);
  Result (*allocate_host)(void**, size_t, unsigned);
  Result (*release_host)(void*);
  Result (*to_device)(Pointer, const void*, size_t, Handle);
  Result (*to_host)(void*, Pointer, size_t, Handle);
  Result (*on_device)(Pointer, Pointer, size_t, Handle);
  Result (*copy)(Pointer, Pointer, size_t, Handle);
  Result (*register_host)(void*, size_t, unsigned);
  Result (*unregister_host)(void*);
  Result (*share)(IpcHandle*, Pointer);
  Result (*open_shared)(Pointer*, IpcHandle, unsigned);
  Result (*close_shared)(Pointer);
  Result (*fill)(Pointer, unsigned char, size_t, Handle);
  Result (*launch)(const LaunchConfig*, Handle, void**, void**);
  // Null if the driver has no such function.
  Result (*wait_value)(Handle, Pointer, uint32_t, unsigned);
  Result (*write_value)(Handle, Pointer, uint32_t, unsigned);
  Result (*loading_mode)(int*);
  // NCCL on this driver's streams; throws if NCCL is not installed.
  const nccl::Library& (*nccl)();
};

// Throws if there is no driver, or if it is too old.
const Driver& driver();

// Throws if the call failed.
void check(Result result, const char* what);

// Creates a stream of the highest priority in the calling thread's context, because other streams wait for
// its work.
Handle create_urgent_stream(const Driver& driver);

// CUDA shares whole blocks with other processes. Shared memory must fill whole blocks, and secret memory must
// not be in a block that anything else in this process may share.
constexpr size_t kSharedBlock = 2u << 20;
constexpr size_t whole_blocks(size_t bytes) {
  return (bytes + kSharedBlock - 1) / kSharedBlock * kSharedBlock;
}

}  // namespace sealring::cuda
