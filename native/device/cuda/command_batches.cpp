#include "device/cuda/command_batches.hpp"

#include <openssl/crypto.h>
#include <openssl/rand.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <stdexcept>

#include "record/record.hpp"

namespace sealring {
namespace {

using cuda::address;
using cuda::check;

constexpr unsigned kBatchGlanceUs = 5;
// A GPU that finishes nothing for this long has failed.
constexpr auto kLongestKernel = std::chrono::minutes(10);
constexpr uint8_t kAllOnes = 0xff;
// The queue number for a command that depends on no other in its batch. poison() also uses the numbers just
// below it.
constexpr uint64_t kNoQueue = ~0ull;

// The words of a group that has ended, and the last numbers used in them.
struct UnusedWords {
  uint8_t* memory = nullptr;
  uint32_t last_number = 0;
  uint64_t batches = 0;
};
struct AllUnusedWords {
  std::mutex lock;
  std::multimap<size_t, UnusedWords> by_size;
};

AllUnusedWords& unused_words() {
  static AllUnusedWords& made = *new AllUnusedWords;  // never destroyed
  return made;
}

UnusedWords take_words(const cuda::Driver& driver, size_t bytes) {
  {
    const std::lock_guard<std::mutex> lock(unused_words().lock);
    if (auto found = unused_words().by_size.extract(bytes); !found.empty()) return found.mapped();
  }
  void* memory = nullptr;
  check(driver.allocate_host(&memory, bytes, cuda::kPortable), "cuMemHostAlloc");
  std::memset(memory, 0, bytes);
  return {static_cast<uint8_t*>(memory)};
}

uint32_t read(const uint32_t* word) {
  return std::atomic_ref<uint32_t>(*const_cast<uint32_t*>(word)).load(std::memory_order_acquire);
}

// Counts wrap around: the comparison is right as long as fewer than 2^31 numbers are in use.
bool has(const uint32_t* word, uint64_t value) {
  return static_cast<int32_t>(read(word) - static_cast<uint32_t>(value)) >= 0;
}

// Called when the GPU has failed: streams that wait for its commands would otherwise wait for ever.
[[noreturn]] void end_process_without_gpu() {
  std::fputs(
      "sealring: the GPU has not done what it was told for ten minutes. What streams wait for will "
      "never come. The process ends here.\n",
      stderr);
  std::_Exit(1);
}

}  // namespace

CommandBatches::CommandBatches(const gpu::Gpu& gpu, uint32_t ring, uint32_t ahead)
    : gpu_(gpu), ring_(ring), ahead_(ahead) {
  try {
    allocate();
  } catch (...) {
    release();
    throw;
  }
}

CommandBatches::~CommandBatches() { release(); }

void CommandBatches::allocate() {
  if (cuda_.wait_value == nullptr || cuda_.write_value == nullptr) {
    throw std::runtime_error("CUDA's driver is too old: it has no cuStreamWaitValue32_v2");
  }
  stream_ = cuda::create_urgent_stream(cuda_);
  const UnusedWords words = take_words(cuda_, words_bytes());
  words_ = words.memory;
  last_number_ = words.last_number;
  skipped_ = words.batches;
  next_ = skipped_ + 1;
  allowed_ = reinterpret_cast<uint32_t*>(words_);
  done_ = reinterpret_cast<uint32_t*>(words_ + kLine);
  failed_ = reinterpret_cast<uint64_t*>(words_ + 2 * kLine);
  reached_ = reinterpret_cast<uint32_t*>(words_ + 3 * kLine);
  over_ = reached_ + kNumbers;
  batches_ = reinterpret_cast<gpu::Batch*>(over_ + kNumbers);
  check(cuda_.allocate(&arrived_, sizeof(uint32_t)), "cuMemAlloc");
  check(cuda_.fill(arrived_, 0, sizeof(uint32_t), stream_), "cuMemsetD8Async");
  void* wrapped = nullptr;
  check(cuda_.allocate_host(&wrapped, wrapped_bytes(), cuda::kPortable), "cuMemHostAlloc");
  wrapped_ = static_cast<uint8_t*>(wrapped);
  check(cuda_.allocate(&unwrapping_, cuda::whole_blocks(wrapped_bytes())), "cuMemAlloc");
  KeyBytes key;
  {
    const NoFork no_fork;
    if (RAND_bytes(key.data(), static_cast<int>(key.size())) != 1)
      throw std::runtime_error("OpenSSL has no random bytes");
  }
  wrapping_ = std::make_unique<SealingKey>(key, UINT64_MAX, Suite::chacha20_poly1305);
  check(cuda_.to_device(keys_.of(keys_.slots), key.data(), key.size(), stream_),
        "cuMemcpyHtoDAsync");
  // Tries a wait on host memory now, because not every GPU can do it in every mode.
  wait_for_value(stream_, allowed_, *allowed_);
  check(cuda_.synchronize(stream_), "cuStreamSynchronize");
}

void CommandBatches::release() noexcept {
  if (stream_ != nullptr) {
    cuda_.synchronize(stream_);
    cuda_.destroy_stream(stream_);
  }
  for (const uint32_t number : taken_) {
    if (number != 0 && !done(number)) release_waiters(number);
  }
  if (arrived_ != 0) cuda_.release(arrived_);
  if (unwrapping_ != 0) cuda_.release(unwrapping_);
  wipe_wrapping_key();
  if (wrapped_ != nullptr) cuda_.release_host(wrapped_);
  if (words_ == nullptr) return;
  const std::lock_guard<std::mutex> lock(unused_words().lock);
  unused_words().by_size.emplace(words_bytes(), UnusedWords{words_, last_number_, submitted()});
}

size_t CommandBatches::words_bytes() const {
  return 3 * kLine + 2 * kNumbers * sizeof(uint32_t) + ring_ * sizeof(gpu::Batch);
}

size_t CommandBatches::memory_bytes() const {
  return words_bytes() + wrapped_bytes() + cuda::whole_blocks(wrapped_bytes());
}

// ---- numbers -----------------------------------------------------------------------------------

// A number's place is free when the previous operation with that place is done.
uint32_t CommandBatches::take_number() {
  for (uint32_t ahead = 1; ahead <= kNumbers; ++ahead) {
    const uint32_t number = last_number_ + ahead;
    uint32_t& taken = taken_[number % kNumbers];
    if (number == 0 || (taken != 0 && !done(taken))) continue;
    taken = number;
    return last_number_ = number;
  }
  return 0;
}

void CommandBatches::mark_reached(uint64_t stream, uint32_t number) const {
  enter();
  check(cuda_.write_value(reinterpret_cast<cuda::Handle>(stream), address(reached_word(number)),
                          number, cuda::kInOrder),
        "cuStreamWriteValue32");
}

void CommandBatches::wait_for_value(cuda::Handle stream, const uint32_t* word,
                                    uint32_t value) const {
  check(cuda_.wait_value(stream, address(word), value, cuda::kNotBefore), "cuStreamWaitValue32");
}

void CommandBatches::wait_on_stream(uint64_t stream, uint32_t number) const {
  enter();
  wait_for_value(reinterpret_cast<cuda::Handle>(stream), done_word(number), number);
}

bool CommandBatches::done(uint32_t number) const { return has(done_word(number), number); }

bool CommandBatches::reached(uint32_t number) const { return has(reached_word(number), number); }

void CommandBatches::release_waiters(uint32_t number) {
  std::atomic_ref<uint32_t>(over_[number % kNumbers]).store(number, std::memory_order_release);
}

// ---- batches -----------------------------------------------------------------------------------

gpu::BatchArgument CommandBatches::argument_of(uint64_t batch, uint32_t blocks) const {
  return {address(&batches_[batch % ring_]), arrived_, address(done_), static_cast<uint32_t>(batch),
          blocks};
}

uint64_t CommandBatches::add(uint64_t queue, const gpu::Command& command) {
  const bool taken = std::find(queues_.begin(), queues_.end(), queue) != queues_.end();
  if (batch_.count != 0 && (taken || batch_.count == gpu::kCommands)) submit_now();
  if (batch_.count == 0) queues_.clear();
  batch_.commands[batch_.count++] = command;
  queues_.push_back(queue);
  return next_;
}

bool CommandBatches::batch_done(uint64_t batch) const {
  return batch <= skipped_ || has(done_, batch);
}

void CommandBatches::submit() {
  if (batch_.count != 0 && batch_done(submitted() + 1 - ahead_)) submit_now();
}

void CommandBatches::submit_all() {
  if (batch_.count != 0) submit_now();
}

// When the previous batch in this place of the ring is done, all thread blocks have read it.
void CommandBatches::submit_now() {
  if (next_ > limit_) throw std::logic_error("more batches than kernels were launched for");
  if (next_ > ring_) wait_until_done(next_ - ring_);
  gpu::Batch& batch = batches_[next_ % ring_];
  const size_t commands = batch_.count == gpu::kStop ? 0 : batch_.count;
  std::memcpy(batch.commands, batch_.commands, commands * sizeof(gpu::Command));
  batch.count = batch_.count;
  std::atomic_ref<uint32_t>(batch.number)
      .store(static_cast<uint32_t>(next_), std::memory_order_release);
  batch_.count = 0;
  handed_over(next_++);
}

// Work that the script put in its stream before the operation may take any time, so it does not count.
void CommandBatches::wait_until_done(uint64_t batch) const {
  auto since = std::chrono::steady_clock::now();
  uint32_t before = read(done_);
  while (!batch_done(batch)) {
    const uint32_t seen = read(done_);
    const auto now = std::chrono::steady_clock::now();
    if (seen != before || (begun_ != 0 && !reached(begun_))) since = now;
    if (now - since > kLongestKernel) end_process_without_gpu();
    before = seen;
    ::usleep(kBatchGlanceUs);
  }
}

void CommandBatches::finish() {
  submit_all();
  wait_until_done(submitted());
}

void CommandBatches::abandon() {
  batch_.count = 0;
  wait_until_done(submitted());
}

void CommandBatches::poison(std::span<const std::span<uint8_t>> results, bool wipe_keys) {
  uint64_t queue = kNoQueue;
  const auto fill = [&](cuda::Pointer at, size_t bytes, uint8_t with) {
    gpu::Command made{};
    made.launch.result = at;
    made.launch.bytes = bytes;
    made.launch.action = gpu::Action::fill;
    made.argument = with;
    add(queue--, made);
  };
  for (const std::span<uint8_t>& result : results)
    fill(address(result.data()), result.size(), kAllOnes);
  if (wipe_keys) fill(keys_.at, keys_.bytes(), 0);
  keys_wiped_ |= wipe_keys;
}

// ---- keys --------------------------------------------------------------------------------------

void CommandBatches::replace_key(int slot, const KeyBytes& key) {
  submit_all();
  const size_t at = static_cast<size_t>(slot) * kWrappedStride;
  Header header;
  header.kind = Kind::data;
  header.length = kKeyBytes;
  header.lane = kGpuLane;
  const Context context{};
  seal_record(*wrapping_, context, header, key.data(), wrapped_ + at);
  uint8_t encoded[kHeaderBytes];
  header.encode(encoded);
  gpu::Command made{};
  made.launch =
      gpu::launch_of({keys_.slots, encoded, context, kKeyBytes, {}}, keys_, unwrapping_ + at, true,
                     nullptr, reinterpret_cast<uint8_t*>(keys_.of(slot)), parts_, failed_);
  made.launch.action = gpu::Action::open;
  made.wire = address(wrapped_ + at);
  add(kNoQueue, made);
  submit_now();
}

void CommandBatches::wipe_wrapping_key() {
  wrapping_.reset();
  if (wrapped_ != nullptr) OPENSSL_cleanse(wrapped_, wrapped_bytes());
}

}  // namespace sealring
