#include "device/cuda/key_memory.hpp"

#include <algorithm>
#include <stdexcept>

#include "keys/secret_memory.hpp"

namespace sealring {

using cuda::check;

KeyMemory::KeyMemory(const cuda::Driver& driver, int ordinal, size_t entries)
    : cuda_(driver), ordinal_(ordinal), entries_(entries) {
  check(cuda_.init(0), "cuInit");
  check(cuda_.retain_primary(&context_, ordinal), "cuDevicePrimaryCtxRetain");
  try {
    check(cuda_.set_current(context_), "cuCtxSetCurrent");
    check(cuda_.create_stream(&stream_, cuda::kNonBlocking, 0), "cuStreamCreate");
    check(cuda_.allocate_in(&at_, cuda::whole_blocks(entries * kEntryBytes), stream_),
          "cuMemAllocAsync");
    check(cuda_.synchronize(stream_), "cuStreamSynchronize");
  } catch (...) {
    release();
    throw;
  }
}

KeyMemory::~KeyMemory() { release(); }

void KeyMemory::add(const KeyBytes& key, const Nonce& base) {
  if (used_ == entries_) throw std::logic_error("more keys than there is memory for");
  SecretBytes entry(kEntryBytes);
  std::copy(key.begin(), key.end(), entry.begin());
  std::copy(base.begin(), base.end(), entry.begin() + kKeyBytes);
  check(cuda_.set_current(context_), "cuCtxSetCurrent");
  check(cuda_.to_device(at_ + used_ * kEntryBytes, entry.data(), entry.size(), stream_),
        "cuMemcpyHtoDAsync");
  check(cuda_.synchronize(stream_), "cuStreamSynchronize");
  ++used_;
}

void KeyMemory::use_until(cuda::Handle stream) {
  check(cuda_.set_current(context_), "cuCtxSetCurrent");
  cuda::Handle reached = nullptr;
  check(cuda_.create_event(&reached, cuda::kDisableTiming), "cuEventCreate");
  const cuda::Result recorded = cuda_.record_event(reached, stream);
  const cuda::Result waits = recorded == cuda::kSuccess ? cuda_.wait_event(stream_, reached, 0) : 0;
  cuda_.destroy_event(reached);
  check(recorded, "cuEventRecord");
  check(waits, "cuStreamWaitEvent");
}

void KeyMemory::wipe() noexcept {
  if (at_ == 0) return;
  cuda_.set_current(context_);
  cuda_.fill(at_, 0, entries_ * kEntryBytes, stream_);
  cuda_.synchronize(stream_);
}

// Does not wait for the GPU. Python's garbage collector may call this at any moment while it holds the GIL,
// also while kernels wait for what another thread is about to do.
void KeyMemory::release() noexcept {
  cuda_.set_current(context_);
  if (at_ != 0) {
    cuda_.fill(at_, 0, entries_ * kEntryBytes, stream_);
    cuda_.release_in(at_, stream_);
  }
  if (stream_ != nullptr) cuda_.destroy_stream(stream_);
  cuda_.release_primary(ordinal_);
}

}  // namespace sealring
