// NCCL's sends and receives, found at run time: a communicator of all ranks of a group.
//
// It never blocks its caller: to make it, and to launch an exchange, is begun here and goes on in
// threads of NCCL's, and `settled` tells when that has ended. So a peer that does not come costs no more
// than the caller's patience.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>

#include "device/cuda/driver.hpp"
#include "device/exchange.hpp"

namespace sealring::nccl {

inline constexpr size_t kIdBytes = 128;
struct UniqueId {
  char bytes[kIdBytes];
};

// ncclConfig_t as of NCCL 2.14, the first that does not block. Later versions take it by its size.
struct Config {
  size_t size = sizeof(Config);
  unsigned magic = 0xcafebeef;
  unsigned version = 21400;
  int blocking = 0;
};

using Result = int;
constexpr Result kSuccess = 0, kInProgress = 7;
constexpr int kByte = 1;  // ncclUint8

struct Library {
  Result (*new_id)(UniqueId*);
  Result (*init)(void**, int, UniqueId, int, Config*);
  Result (*group_start)();
  Result (*group_end)();
  Result (*send)(const void*, size_t, int, int, void*, cuda::Handle);
  Result (*receive)(void*, size_t, int, int, void*, cuda::Handle);
  Result (*async_error)(void*, Result*);
  Result (*abort)(void*);
  const char* (*explain)(Result);
};

// Throws where there is no NCCL, or one too old.
const Library& library();

class Communicator {
 public:
  // Begins to make it, in the calling thread's context. All ranks come with the same id.
  Communicator(const Library& library, const UniqueId& id, int rank, int world);
  ~Communicator() { abort(); }
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  // Whether the operation begun last is complete: making the communicator, or launching an exchange.
  // Throws what went wrong in it, or in an exchange that was launched before.
  bool settled() const;
  // Begins to launch an exchange in the stream. The operation before must be complete.
  void exchange(const Exchange& exchange, cuda::Handle stream);
  // Ends what is under way; nothing can be begun any more. No other call may be under way.
  void abort() noexcept;

 private:
  void check(Result result, const char* what) const;

  const Library& library_;
  void* communicator_ = nullptr;
};

std::array<uint8_t, kIdBytes> new_id(const Library& library);

}  // namespace sealring::nccl
