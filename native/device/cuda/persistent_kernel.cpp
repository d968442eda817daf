#include "device/cuda/persistent_kernel.hpp"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <stdexcept>

#include "device/cuda/wait_words.hpp"

namespace sealring {
namespace {

using cuda::address;
using cuda::check;

constexpr unsigned kGlanceUs = 5;
constexpr auto kLongestKernel = std::chrono::minutes(10);

struct Numbers {
  uint8_t* memory = nullptr;
  uint32_t last_number = 0;
  uint64_t next = 1;
};

std::atomic<int> running_kernels{0};

// Counts in a circle: "not before" holds as long as no 2^31 are out at once.
bool has(uint32_t& number, uint32_t value) {
  const uint32_t seen = std::atomic_ref<uint32_t>(number).load(std::memory_order_acquire);
  return static_cast<int32_t>(seen - value) >= 0;
}

}  // namespace

PersistentKernel::PersistentKernel(const cuda::Driver& driver, uint64_t function, uint32_t parts)
    : cuda_(driver), function_(function), parts_(parts) {
  if (cuda_.wait_value == nullptr || cuda_.write_value == nullptr) {
    throw std::runtime_error("CUDA's driver is too old: it has no cuStreamWaitValue32_v2");
  }
  stream_ = cuda::create_urgent_stream(cuda_);
  const auto numbers = WaitWords<Numbers>::take(cuda_, memory_bytes());
  last_number_ = numbers.last_number;
  next_ = numbers.next;
  batch_memory_ = reinterpret_cast<gpu::Batch*>(numbers.memory);
  done_ = reinterpret_cast<uint32_t*>(numbers.memory + kWords - kLine);
  reached_ = reinterpret_cast<uint32_t*>(numbers.memory + kWords);
  over_ = reached_ + kNumbers;
  check(cuda_.allocate(&arrived_, sizeof(uint32_t)), "cuMemAlloc");
  check(cuda_.fill(arrived_, 0, sizeof(uint32_t), stream_), "cuMemsetD8Async");
  check(cuda_.synchronize(stream_), "cuStreamSynchronize");
}

PersistentKernel::~PersistentKernel() {
  if (running_) stop();
  if (stream_ != nullptr) {
    cuda_.synchronize(stream_);
    cuda_.destroy_stream(stream_);
  }
  if (arrived_ != 0) cuda_.release(arrived_);
  if (batch_memory_ == nullptr) return;
  // Releases all streams. A word may have been passed over: it is set to the last number it can have had.
  for (uint32_t back = 0; back < kNumbers; ++back) {
    const uint32_t number = last_number_ - back;
    if (under_way_[number % kNumbers]) release_waiters(number);
  }
  WaitWords<Numbers>::give_back({reinterpret_cast<uint8_t*>(batch_memory_), last_number_, next_});
}

void PersistentKernel::launch() const {
  const gpu::BatchArgument argument{address(batch_memory_), arrived_, address(done_), static_cast<uint32_t>(next_), parts_};
  gpu::launch(cuda_, function_, gpu::kCommands * parts_, gpu::kThreads, parts_, &argument, stream_);
}

void PersistentKernel::mark_running() {
  running_ = true;
  ++running_kernels;
}

bool PersistentKernel::any_running() { return running_kernels != 0; }

// A number's place is free when the message that had it before is done.
uint32_t PersistentKernel::take_number() {
  for (uint32_t ahead = 1; ahead <= kNumbers; ++ahead) {
    const uint32_t number = last_number_ + ahead;
    if (number == 0 || under_way_[number % kNumbers]) continue;
    under_way_[number % kNumbers] = true;
    return last_number_ = number;
  }
  return 0;
}

void PersistentKernel::mark(cuda::Handle stream, uint32_t number) const {
  check(cuda_.write_value(stream, address(&reached_[number % kNumbers]), number, cuda::kInOrder),
        "cuStreamWriteValue32");
}

void PersistentKernel::make_stream_wait(cuda::Handle stream, uint32_t number) const {
  check(cuda_.wait_value(stream, address(&over_[number % kNumbers]), number, cuda::kNotBefore),
        "cuStreamWaitValue32");
}

bool PersistentKernel::is_done(uint32_t number) const { return has(over_[number % kNumbers], number); }

bool PersistentKernel::stream_reached(uint32_t number) const { return has(reached_[number % kNumbers], number); }

void PersistentKernel::release_waiters(uint32_t number) {
  under_way_[number % kNumbers] = false;
  std::atomic_ref<uint32_t>(over_[number % kNumbers]).store(number, std::memory_order_release);
}

// ---- what it is told ---------------------------------------------------------------------------

uint64_t PersistentKernel::add(uint64_t queue, const gpu::Command& command) {
  const bool taken = std::find(queues_.begin(), queues_.end(), queue) != queues_.end();
  if (batch_.count != 0 && (taken || !has_room())) submit_now();
  if (batch_.count == 0) queues_.clear();
  batch_.commands[batch_.count++] = command;
  queues_.push_back(queue);
  return next_;
}

bool PersistentKernel::done(uint64_t batch) const {
  return has(*done_, static_cast<uint32_t>(batch));
}

void PersistentKernel::submit() {
  if (batch_.count != 0 && done(submitted())) write_batch();
}

void PersistentKernel::submit_now() {
  wait_until_done();
  write_batch();
}

void PersistentKernel::submit_all() {
  if (batch_.count != 0) submit_now();
}

// All of the kernel's blocks have read the one before.
void PersistentKernel::write_batch() {
  const bool leaves = batch_.count == gpu::kStop;
  const size_t bytes = sizeof(gpu::Command) * (leaves ? 0 : batch_.count);
  std::memcpy(batch_memory_->commands, batch_.commands, bytes);
  batch_memory_->count = batch_.count;
  std::atomic_ref<uint32_t>(batch_memory_->number).store(static_cast<uint32_t>(next_), std::memory_order_release);
  ++next_;
  batch_.count = 0;
}

void PersistentKernel::wait_until_done() const {
  const auto since = std::chrono::steady_clock::now();
  while (!done(submitted())) {
    if (std::chrono::steady_clock::now() - since > kLongestKernel) end_process_without_gpu();
    ::usleep(kGlanceUs);
  }
}

void PersistentKernel::finish() {
  submit_all();
  wait_until_done();
}

void PersistentKernel::abandon() {
  batch_.count = 0;
  wait_until_done();
}

void PersistentKernel::stop() {
  submit_all();
  batch_.count = gpu::kStop;
  submit_now();
  running_ = false;
  --running_kernels;
}

}  // namespace sealring
