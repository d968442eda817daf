#include "device/cuda/persistent_kernel.hpp"

#include <atomic>

namespace sealring {
namespace {

std::atomic<int> running_kernels{0};

}  // namespace

PersistentKernel::PersistentKernel(const gpu::Gpu& gpu, uint64_t function, uint32_t parts)
    : CommandBatches(gpu, 1, 1), function_(function) {
  parts_ = parts;
}

PersistentKernel::~PersistentKernel() {
  if (running_) stop(false);
}

void PersistentKernel::launch() const {
  enter();
  const gpu::BatchArgument argument = argument_of(next_, parts_);
  gpu::launch(cuda_, function_, gpu::kCommands * parts_, gpu::kThreads, parts_, &argument, stream_);
}

void PersistentKernel::mark_running() {
  running_ = true;
  ++running_kernels;
}

bool PersistentKernel::any_running() { return running_kernels != 0; }

void PersistentKernel::fail(const Submitted& operation,
                            std::span<const std::span<uint8_t>> results) noexcept {
  poison(results, false);
  finish();
  release_waiters(operation.number);
}

void PersistentKernel::stop(bool wipe_keys) {
  if (wipe_keys) {
    poison({}, true);
    finish();
  }
  submit_all();
  batch_.count = gpu::kStop;
  submit_now();
  running_ = false;
  --running_kernels;
}

}  // namespace sealring
