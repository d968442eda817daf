#include "device/cuda/prelaunched_kernels.hpp"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>

#include "device/cuda/wait_words.hpp"

namespace sealring {
namespace {

using cuda::address;
using cuda::check;

constexpr unsigned kGlanceUs = 5;
// A queue of CUDA's holds about a thousand entries, and a kernel is two of them. A caller that launches
// more blocks until some are done.
constexpr uint32_t kAtOnce = 256;
// A GPU that runs nothing for so long has failed.
constexpr auto kLongestKernel = std::chrono::minutes(10);

}  // namespace

void end_process_without_gpu() {
  std::fputs(
      "sealring: the GPU has not done what it was told for ten minutes. What streams wait for will "
      "never come. The process ends here.\n",
      stderr);
  std::_Exit(1);
}

PrelaunchedKernels::PrelaunchedKernels(const cuda::Driver& driver) : cuda_(driver) {
  if (cuda_.wait_value == nullptr || cuda_.write_value == nullptr) {
    throw std::runtime_error("CUDA's driver is too old: it has no cuStreamWaitValue32_v2");
  }
  stream_ = cuda::create_urgent_stream(cuda_);
  const auto numbers = WaitWords<Numbers>::take(cuda_, memory_bytes());
  calls_ = begun_calls_ = numbers.calls;
  launched_ = numbers.launched;
  next_ = launched_ + 1;
  limit_ = last_ = seen_done_ = launched_;
  uint8_t* const start = numbers.memory;
  allowed_ = reinterpret_cast<uint32_t*>(start);
  done_ = reinterpret_cast<uint32_t*>(start + kLine);
  over_ = reinterpret_cast<uint32_t*>(start + 2 * kLine);
  ready_ = reinterpret_cast<uint32_t*>(start + 3 * kLine);
  batches_ = reinterpret_cast<gpu::Batch*>(start + kWords);
  check(cuda_.allocate(&arrived_, sizeof(uint32_t)), "cuMemAlloc");
  check(cuda_.fill(arrived_, 0, sizeof(uint32_t), stream_), "cuMemsetD8Async");
  // Not every GPU can wait at host memory in every mode. Now is the time to see.
  wait(stream_, allowed_, static_cast<uint32_t>(launched_));
  check(cuda_.synchronize(stream_), "cuStreamSynchronize");
}

PrelaunchedKernels::~PrelaunchedKernels() {
  if (allowed_ != nullptr) allow_up_to(launched_);
  if (stream_ != nullptr) {
    cuda_.synchronize(stream_);
    cuda_.destroy_stream(stream_);
  }
  if (arrived_ != 0) cuda_.release(arrived_);
  if (allowed_ == nullptr) return;
  std::atomic_ref<uint32_t>(*over_).store(calls_);  // releases all streams
  WaitWords<Numbers>::give_back({reinterpret_cast<uint8_t*>(allowed_), calls_, launched_});
}

// Counts in a circle: "not before" holds as long as no 2^31 are out at once.
void PrelaunchedKernels::wait(cuda::Handle stream, const uint32_t* number, uint32_t value) const {
  check(cuda_.wait_value(stream, address(number), value, cuda::kNotBefore), "cuStreamWaitValue32");
}

uint64_t PrelaunchedKernels::launch(const KernelShape& shape, uint32_t count, cuda::Handle after) {
  launch_rest();  // of one whose caller was interrupted
  uint32_t* const ready = &ready_[++calls_ % kCalls];
  check(cuda_.write_value(after, address(ready), calls_, cuda::kInOrder), "cuStreamWriteValue32");
  wait(stream_, ready, calls_);
  const uint64_t first = launched_ + 1;
  shape_ = shape;
  rest_ = count;
  launch_some(std::min(rest_, kAtOnce));
  return first;
}

void PrelaunchedKernels::launch_rest() { launch_some(rest_); }

uint32_t PrelaunchedKernels::mark_end() {
  check(cuda_.write_value(stream_, address(over_), calls_, cuda::kInOrder), "cuStreamWriteValue32");
  return calls_;
}

void PrelaunchedKernels::make_stream_wait(cuda::Handle stream, uint32_t over) const { wait(stream, over_, over); }

bool PrelaunchedKernels::is_done(uint32_t over) const {
  const uint32_t number = std::atomic_ref<uint32_t>(*over_).load(std::memory_order_acquire);
  return static_cast<int32_t>(number - over) >= 0;
}

void PrelaunchedKernels::launch_some(uint32_t count) {
  for (; count != 0; --count, --rest_) {
    const uint64_t next = launched_ + 1;
    const gpu::BatchArgument argument{address(&batches_[next % kBatches]), arrived_, address(done_),
                           static_cast<uint32_t>(next), shape_.blocks};
    wait(stream_, allowed_, argument.number);
    gpu::launch(cuda_, shape_.function, gpu::kCommands * shape_.blocks, gpu::kThreads, shape_.parts,
                &argument, stream_);
    launched_ = next;
  }
}

void PrelaunchedKernels::begin(uint64_t first, uint32_t count, uint32_t spare) {
  ++begun_calls_;
  next_ = first;
  limit_ = first + count - 1;
  last_ = limit_ + spare;
  seen_done_ = first - 1;  // none of its own
  batch_.count = 0;
}

// The newest kernel of this collective that has obeyed. The GPU's number has 32 bits of it.
uint64_t PrelaunchedKernels::done() const {
  const uint32_t number = std::atomic_ref<uint32_t>(*done_).load(std::memory_order_acquire);
  const auto ahead = static_cast<int32_t>(number - static_cast<uint32_t>(seen_done_));
  if (ahead > 0) seen_done_ += static_cast<uint32_t>(ahead);
  return seen_done_;
}

bool PrelaunchedKernels::done(uint64_t kernel) const { return done() >= kernel; }

// A command may push out the batch in front of it.
bool PrelaunchedKernels::has_room() const { return next_ + 1 - done() < kBatches; }

uint64_t PrelaunchedKernels::add(uint64_t queue, const gpu::Command& command) {
  const bool taken = std::find(queues_.begin(), queues_.end(), queue) != queues_.end();
  if (batch_.count != 0 && (taken || batch_.count == gpu::kCommands)) submit_now();
  if (batch_.count == 0) queues_.clear();
  batch_.commands[batch_.count++] = command;
  queues_.push_back(queue);
  return next_;
}

void PrelaunchedKernels::submit() {
  if (batch_.count != 0 && submitted() < done() + kBusy) submit_now();
}

void PrelaunchedKernels::submit_now() {
  if (next_ > limit_) throw std::logic_error("more batches than kernels were launched for");
  batch_.number = static_cast<uint32_t>(next_);
  std::memcpy(&batches_[next_ % kBatches], &batch_,
              sizeof batch_ - (gpu::kCommands - batch_.count) * sizeof(gpu::Command));
  batch_.count = 0;
  allow_up_to(next_++);
}

void PrelaunchedKernels::allow_up_to(uint64_t kernel) {
  std::atomic_ref<uint32_t>(*allowed_).store(static_cast<uint32_t>(kernel), std::memory_order_release);
}

// What the script put in front of the collective may take its time.
void PrelaunchedKernels::wait_until_done() {
  auto since = std::chrono::steady_clock::now();
  uint64_t before = done();
  while (before < submitted()) {
    const uint32_t ready =
        std::atomic_ref<uint32_t>(ready_[begun_calls_ % kCalls]).load(std::memory_order_acquire);
    const auto now = std::chrono::steady_clock::now();
    if (ready != begun_calls_ || done() != before) since = now;
    if (now - since > kLongestKernel) end_process_without_gpu();
    before = done();
    ::usleep(kGlanceUs);
  }
}

void PrelaunchedKernels::abandon() {
  batch_.count = 0;
  wait_until_done();
}

void PrelaunchedKernels::end() {
  if (batch_.count != 0) submit_now();
  wait_until_done();
  allow_up_to(last_);
  next_ = last_ + 1;
}

}  // namespace sealring
