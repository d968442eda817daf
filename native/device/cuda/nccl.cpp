#include "device/cuda/nccl.hpp"

#include <cstring>
#include <stdexcept>
#include <string>

#include "device/cuda/shared_library.hpp"

namespace sealring::nccl {
namespace {

constexpr int kByte = 1;  // ncclUint8
constexpr int kSender = 0, kReceiver = 1;

struct UniqueId {
  char bytes[kIdBytes];
};

struct Library {
  int (*new_id)(UniqueId*);
  int (*init)(void**, int, UniqueId, int);
  int (*send)(const void*, size_t, int, int, void*, cuda::Handle);
  int (*receive)(void*, size_t, int, int, void*, cuda::Handle);
  int (*abort)(void*);
  int (*destroy)(void*);
  const char* (*explain)(int);
};

Library load() {
  // CUDA builds of torch have it in the process already.
  const SharedLibrary library("NCCL", "libnccl.so.2");
  Library out;
  library.find(out.new_id, "ncclGetUniqueId");
  library.find(out.init, "ncclCommInitRank");
  library.find(out.send, "ncclSend");
  library.find(out.receive, "ncclRecv");
  library.find(out.abort, "ncclCommAbort");
  library.find(out.destroy, "ncclCommDestroy");
  library.find(out.explain, "ncclGetErrorString");
  return out;
}

const Library& library() {
  static const Library loaded = load();
  return loaded;
}

void check(int result, const char* what) {
  if (result == 0) return;
  throw std::runtime_error(std::string("NCCL failed in ") + what + ": " +
                           library().explain(result));
}

}  // namespace

Id new_id() {
  UniqueId made;
  check(library().new_id(&made), "ncclGetUniqueId");
  Id out;
  std::memcpy(out.data(), made.bytes, out.size());
  return out;
}

Channel::Channel(std::span<const uint8_t> id, bool sends) {
  UniqueId wanted;
  if (id.size() != sizeof wanted.bytes) throw std::runtime_error("no id of NCCL's");
  std::memcpy(wanted.bytes, id.data(), id.size());
  check(library().init(&communicator_, 2, wanted, sends ? kSender : kReceiver), "ncclCommInitRank");
  const cuda::Driver& cuda = cuda::driver();
  int least = 0, greatest = 0;
  try {
    cuda::check(cuda.priority_range(&least, &greatest), "cuCtxGetStreamPriorityRange");
    cuda::check(cuda.create_stream(&stream_, cuda::kNonBlocking, greatest),
                "cuStreamCreateWithPriority");
    pass_one_byte(sends);
  } catch (...) {
    library().abort(communicator_);
    if (stream_ != nullptr) cuda.destroy_stream(stream_);
    throw;
  }
}

// NCCL loads its kernels at the first use of them, and connects. That is to be over before anything
// depends on it: while one kernel waits for its other end, a driver may not load the next.
void Channel::pass_one_byte(bool sends) {
  const cuda::Driver& cuda = cuda::driver();
  cuda::Pointer byte = 0;
  cuda::check(cuda.allocate(&byte, 1), "cuMemAlloc");
  cuda::check(cuda.fill(byte, 0, 1, stream_), "cuMemsetD8Async");
  void* const at = reinterpret_cast<void*>(byte);
  const int result = sends ? library().send(at, 1, kByte, kReceiver, communicator_, stream_)
                           : library().receive(at, 1, kByte, kSender, communicator_, stream_);
  const cuda::Result passed = result == 0 ? cuda.synchronize(stream_) : cuda::kSuccess;
  cuda.release(byte);
  check(result, "its first message");
  cuda::check(passed, "cuStreamSynchronize");
}

Channel::~Channel() {
  abandon();
  if (communicator_ != nullptr) library().destroy(communicator_);
  if (stream_ != nullptr) cuda::driver().destroy_stream(stream_);
}

void Channel::send(cuda::Pointer from, size_t bytes, cuda::Handle when) {
  cuda::check(cuda::driver().wait_event(stream_, when, 0), "cuStreamWaitEvent");
  check(library().send(reinterpret_cast<const void*>(from), bytes, kByte, kReceiver, communicator_,
                       stream_),
        "ncclSend");
}

void Channel::receive(cuda::Pointer into, size_t bytes, cuda::Handle done) {
  check(library().receive(reinterpret_cast<void*>(into), bytes, kByte, kSender, communicator_,
                          stream_),
        "ncclRecv");
  cuda::check(cuda::driver().record_event(done, stream_), "cuEventRecord");
}

void Channel::abandon() noexcept {
  if (communicator_ == nullptr || cuda::driver().query_stream(stream_) == cuda::kSuccess) return;
  library().abort(communicator_);
  communicator_ = nullptr;
}

}  // namespace sealring::nccl
