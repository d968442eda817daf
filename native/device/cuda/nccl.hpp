// NCCL's sends and receives, looked up at run time, through a communicator of all ranks of a group.
//
// No call here blocks. Making a communicator and launching an exchange are begun here and go on in NCCL's
// threads; settled() tells when they have ended. So a peer that does not come costs no more than the caller's
// timeout.
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

// ncclConfig_t of NCCL 2.14, the first version with non-blocking communicators. Later versions recognise it
// by its size.
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

// Throws if NCCL is not installed or too old.
const Library& library();

class Communicator {
 public:
  // Begins to make the communicator in the calling thread's context. All ranks use the same id.
  Communicator(const Library& library, const UniqueId& id, int rank, int world);
  ~Communicator() { abort(); }
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  // Whether the last operation (making the communicator, or launching an exchange) is complete. Throws if it
  // failed, or if an earlier exchange did.
  bool settled() const;
  // Begins to launch an exchange in the stream. The previous operation must be complete.
  void exchange(const Exchange& exchange, cuda::Handle stream);
  // Ends what is under way; nothing can be begun afterwards. No other call may be under way.
  void abort() noexcept;

 private:
  void check(Result result, const char* what) const;

  const Library& library_;
  void* communicator_ = nullptr;
};

std::array<uint8_t, kIdBytes> new_id(const Library& library);

}  // namespace sealring::nccl
