#include "device/cuda/nccl.hpp"

#include <cstring>
#include <stdexcept>
#include <string>

#include "device/cuda/shared_library.hpp"

namespace sealring::nccl {
namespace {

Library load() {
  // CUDA builds of torch have already loaded it.
  const SharedLibrary library("NCCL", "libnccl.so.2");
  Library out;
  library.find(out.new_id, "ncclGetUniqueId");
  library.find(out.init, "ncclCommInitRankConfig");
  library.find(out.group_start, "ncclGroupStart");
  library.find(out.group_end, "ncclGroupEnd");
  library.find(out.send, "ncclSend");
  library.find(out.receive, "ncclRecv");
  library.find(out.async_error, "ncclCommGetAsyncError");
  library.find(out.abort, "ncclCommAbort");
  library.find(out.explain, "ncclGetErrorString");
  return out;
}

[[noreturn]] void fail(const Library& library, Result result, const char* what) {
  throw std::runtime_error(std::string("NCCL failed in ") + what + ": " + library.explain(result));
}

}  // namespace

const Library& library() {
  static const Library loaded = load();
  return loaded;
}

std::array<uint8_t, kIdBytes> new_id(const Library& library) {
  UniqueId made;
  if (const Result result = library.new_id(&made); result != kSuccess)
    fail(library, result, "ncclGetUniqueId");
  std::array<uint8_t, kIdBytes> out;
  std::memcpy(out.data(), made.bytes, out.size());
  return out;
}

Communicator::Communicator(const Library& library, const UniqueId& id, int rank, int world)
    : library_(library) {
  Config config;
  check(library_.init(&communicator_, world, id, rank, &config), "ncclCommInitRankConfig");
}

void Communicator::check(Result result, const char* what) const {
  if (result != kSuccess && result != kInProgress) fail(library_, result, what);
}

bool Communicator::settled() const {
  Result state = kSuccess;
  check(library_.async_error(communicator_, &state), "ncclCommGetAsyncError");
  check(state, "what it does in the background");
  return state == kSuccess;
}

void Communicator::exchange(const Exchange& exchange, cuda::Handle stream) {
  check(library_.group_start(), "ncclGroupStart");
  Result first = kSuccess;
  const auto note = [&](Result result) {
    if (first == kSuccess && result != kInProgress) first = result;
  };
  for (const Transfer& each : exchange.sends)
    note(library_.send(each.at, each.bytes, kByte, each.peer, communicator_, stream));
  for (const Transfer& each : exchange.receives)
    note(library_.receive(each.at, each.bytes, kByte, each.peer, communicator_, stream));
  note(library_.group_end());  // always called, because the open group belongs to the thread
  check(first, "an exchange");
}

void Communicator::abort() noexcept {
  if (communicator_ != nullptr) library_.abort(communicator_);
  communicator_ = nullptr;
}

}  // namespace sealring::nccl
