#include "device/cuda/prelaunched_kernels.hpp"

#include <algorithm>
#include <stdexcept>

namespace sealring {
namespace {

// A CUDA queue holds about a thousand entries, and a kernel takes two. A caller that launches more than fit
// blocks until some have run.
constexpr uint32_t kAtOnce = 256;

}  // namespace

PrelaunchedKernels::PrelaunchedKernels(const gpu::Gpu& gpu)
    : CommandBatches(gpu, kRing, kAhead), launched_(submitted()), ended_(launched_) {}

PrelaunchedKernels::~PrelaunchedKernels() {
  allow_up_to(launched_);
  next_ = launched_ + 1;
}

Submitted PrelaunchedKernels::launch(const KernelShape& shape, uint32_t commands, uint32_t spare,
                                     uint64_t after) {
  const std::lock_guard<std::mutex> lock(launching_);
  launch_some(rest_);  // for a collective whose caller was interrupted
  const uint32_t number = take_number();
  if (number == 0) return {};
  mark_reached(after, number);
  wait_for_value(stream_, reached_word(number), number);
  const uint64_t first = launched_ + 1;
  shape_ = shape;
  total_ = rest_ = commands + spare;
  launch_some(std::min(rest_, kAtOnce));
  ++unfinished_;
  return {number, first, commands, spare, nullptr};
}

void PrelaunchedKernels::launch_up_to(uint32_t count) {
  const std::lock_guard<std::mutex> lock(launching_);
  const uint32_t launched = total_ - rest_;
  if (count <= launched) return;
  enter();
  launch_some(std::min(count - launched, rest_));
}

void PrelaunchedKernels::launch_rest() { launch_up_to(UINT32_MAX); }

void PrelaunchedKernels::mark_end(uint32_t number) {
  const std::lock_guard<std::mutex> lock(launching_);
  enter();
  cuda::check(cuda_.write_value(stream_, cuda::address(done_word(number)), number, cuda::kInOrder),
              "cuStreamWriteValue32");
}

void PrelaunchedKernels::launch_some(uint32_t count) {
  for (; count != 0; --count, --rest_) {
    const uint64_t next = launched_ + 1;
    const gpu::BatchArgument argument = argument_of(next, shape_.blocks);
    wait_for_value(stream_, allowed_, argument.number);
    gpu::launch(cuda_, shape_.function, gpu::kCommands * shape_.blocks, gpu::kThreads, shape_.parts,
                &argument, stream_);
    launched_ = next;
  }
}

void PrelaunchedKernels::begin(const Submitted& operation, uint32_t parts) {
  running_ = true;
  parts_ = parts;
  begun_ = operation.number;
  first_ = next_ = operation.first;
  limit_ = first_ + operation.commands - 1;
  last_ = limit_ + operation.spare;
  skipped_ = first_ - 1;  // kernels before it that got no batch
  batch_.count = 0;
}

// Room for two batches is needed: adding a command may first submit the batch before it.
bool PrelaunchedKernels::has_room() const {
  return next_ + 2 <= kRing || batch_done(next_ + 2 - kRing);
}

void PrelaunchedKernels::allow_up_to(uint64_t kernel) {
  std::atomic_ref<uint32_t>(*allowed_).store(static_cast<uint32_t>(kernel),
                                             std::memory_order_release);
}

void PrelaunchedKernels::fail(const Submitted& operation,
                              std::span<const std::span<uint8_t>> results) noexcept {
  if (operation.first <= ended_) return;
  // The collective was never begun.
  if (!running_ || first_ != operation.first) begin(operation, 1);
  limit_ = last_;
  // A failed collective has ended the group, so the keys are wiped too.
  poison(results, true);
  end();
}

void PrelaunchedKernels::end() {
  finish();
  allow_up_to(last_);
  next_ = last_ + 1;
  ended_ = last_;
  running_ = false;
  begun_ = 0;
  --unfinished_;
}

}  // namespace sealring
