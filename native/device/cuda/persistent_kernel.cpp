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

std::atomic<int> all_that_are_in{0};

// Counts in a circle: "not before" holds as long as no 2^31 are out at once.
bool has(uint32_t& number, uint32_t value) {
  const uint32_t seen = std::atomic_ref<uint32_t>(number).load(std::memory_order_acquire);
  return static_cast<int32_t>(seen - value) >= 0;
}

}  // namespace

Porter::Porter(const cuda::Driver& driver, uint64_t function, uint32_t parts)
    : cuda_(driver), function_(function), parts_(parts) {
  if (cuda_.wait_value == nullptr || cuda_.write_value == nullptr) {
    throw std::runtime_error("CUDA's driver is too old: it has no cuStreamWaitValue32_v2");
  }
  stream_ = cuda::create_urgent_stream(cuda_);
  const auto numbers = LastingNumbers<Numbers>::take(cuda_, memory_bytes());
  last_number_ = numbers.last_number;
  next_ = numbers.next;
  told_ = reinterpret_cast<gpu::Batch*>(numbers.memory);
  done_ = reinterpret_cast<uint32_t*>(numbers.memory + kWords - kLine);
  come_ = reinterpret_cast<uint32_t*>(numbers.memory + kWords);
  over_ = come_ + kNumbers;
  check(cuda_.allocate(&arrived_, sizeof(uint32_t)), "cuMemAlloc");
  check(cuda_.fill(arrived_, 0, sizeof(uint32_t), stream_), "cuMemsetD8Async");
  check(cuda_.synchronize(stream_), "cuStreamSynchronize");
}

Porter::~Porter() {
  if (in_) leave();
  if (stream_ != nullptr) {
    cuda_.synchronize(stream_);
    cuda_.destroy_stream(stream_);
  }
  if (arrived_ != 0) cuda_.release(arrived_);
  if (told_ == nullptr) return;
  // Nobody is to wait for a group that is gone. Places may have been passed over: the last number that
  // a place can have had.
  for (uint32_t back = 0; back < kNumbers; ++back) {
    const uint32_t number = last_number_ - back;
    if (under_way_[number % kNumbers]) let_go(number);
  }
  LastingNumbers<Numbers>::leave({reinterpret_cast<uint8_t*>(told_), last_number_, next_});
}

void Porter::launch() const {
  const gpu::Shift shift{address(told_), arrived_, address(done_), static_cast<uint32_t>(next_), parts_};
  gpu::launch(cuda_, function_, gpu::kCommands * parts_, gpu::kThreads, parts_, &shift, stream_);
}

void Porter::come_in() {
  in_ = true;
  ++all_that_are_in;
}

bool Porter::any_is_in() { return all_that_are_in != 0; }

// A number's place is free when the message that had it before is done.
uint32_t Porter::take_number() {
  for (uint32_t ahead = 1; ahead <= kNumbers; ++ahead) {
    const uint32_t number = last_number_ + ahead;
    if (number == 0 || under_way_[number % kNumbers]) continue;
    under_way_[number % kNumbers] = true;
    return last_number_ = number;
  }
  return 0;
}

void Porter::mark(cuda::Handle stream, uint32_t number) const {
  check(cuda_.write_value(stream, address(&come_[number % kNumbers]), number, cuda::kInOrder),
        "cuStreamWriteValue32");
}

void Porter::hold(cuda::Handle stream, uint32_t number) const {
  check(cuda_.wait_value(stream, address(&over_[number % kNumbers]), number, cuda::kNotBefore),
        "cuStreamWaitValue32");
}

bool Porter::is_over(uint32_t number) const { return has(over_[number % kNumbers], number); }

bool Porter::has_come(uint32_t number) const { return has(come_[number % kNumbers], number); }

void Porter::let_go(uint32_t number) {
  under_way_[number % kNumbers] = false;
  std::atomic_ref<uint32_t>(over_[number % kNumbers]).store(number, std::memory_order_release);
}

// ---- what it is told ---------------------------------------------------------------------------

uint64_t Porter::add(uint64_t queue, const gpu::Command& command) {
  const bool taken = std::find(queues_.begin(), queues_.end(), queue) != queues_.end();
  if (batch_.count != 0 && (taken || !has_room())) hand_over_now();
  if (batch_.count == 0) queues_.clear();
  batch_.commands[batch_.count++] = command;
  queues_.push_back(queue);
  return next_;
}

bool Porter::done(uint64_t batch) const {
  return has(*done_, static_cast<uint32_t>(batch));
}

void Porter::hand_over() {
  if (batch_.count != 0 && done(handed_over())) write_batch();
}

void Porter::hand_over_now() {
  wait_until_done();
  write_batch();
}

void Porter::hand_over_all() {
  if (batch_.count != 0) hand_over_now();
}

// All of the kernel's blocks have read the one before.
void Porter::write_batch() {
  const bool leaves = batch_.count == gpu::kDismissed;
  const size_t bytes = sizeof(gpu::Command) * (leaves ? 0 : batch_.count);
  std::memcpy(told_->commands, batch_.commands, bytes);
  told_->count = batch_.count;
  std::atomic_ref<uint32_t>(told_->number).store(static_cast<uint32_t>(next_), std::memory_order_release);
  ++next_;
  batch_.count = 0;
}

void Porter::wait_until_done() const {
  const auto since = std::chrono::steady_clock::now();
  while (!done(handed_over())) {
    if (std::chrono::steady_clock::now() - since > kLongestKernel) end_process_of_a_dead_gpu();
    ::usleep(kGlanceUs);
  }
}

void Porter::finish() {
  hand_over_all();
  wait_until_done();
}

void Porter::abandon() {
  batch_.count = 0;
  wait_until_done();
}

void Porter::leave() {
  hand_over_all();
  batch_.count = gpu::kDismissed;
  hand_over_now();
  in_ = false;
  --all_that_are_in;
}

}  // namespace sealring
