// Collectives whose kernels were launched ahead, and messages that streams wait for: their commands are
// written to memory (command_queue.hpp).
#include <openssl/rand.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "device/cuda/cuda_device.hpp"

namespace sealring {
namespace {

using cuda::address;
using cuda::check;

constexpr uint8_t kAllOnes = 0xff;
constexpr unsigned kGlanceUs = 5;

// The queue of what must be done before all else, and its neighbours.
constexpr uint64_t kNoQueue = ~0ull;

}  // namespace

void CudaDevice::enable_prelaunch(uint64_t run_one_batch) {
  make_current();
  run_one_batch_ = run_one_batch;
  prelaunched_ = std::make_unique<PrelaunchedKernels>(cuda_);
  make_wrapping();
}

void CudaDevice::enable_persistent_kernel(uint64_t run_all_batches) {
  make_current();
  persistent_kernel_ = std::make_unique<PersistentKernel>(cuda_, run_all_batches, gpu::parts_of(kGpuPayload));
  make_wrapping();
}

void CudaDevice::make_wrapping() {
  const size_t wrapped = static_cast<size_t>(key_slots_) * kWrappedStride;
  wrapped_ = take_pinned_memory(wrapped);
  check(cuda_.allocate(&unwrapping_, whole_blocks(wrapped)), "cuMemAlloc");
  held_ += wrapped + whole_blocks(wrapped);
  KeyBytes key;
  if (RAND_bytes(key.data(), static_cast<int>(key.size())) != 1) {
    throw std::runtime_error("OpenSSL has no random bytes");
  }
  wrapping_ = std::make_unique<SealingKey>(key, UINT64_MAX, Suite::chacha20_poly1305);
  put_key(key_slots_, key);  // one more than the group has
}

Device::Prepared CudaDevice::prepare(const Need& need) {
  const std::lock_guard<std::mutex> lock(preparing_);
  if (!prelaunched_) throw std::logic_error("enable_prelaunch() was not called");
  make_current();
  if (need.scratch_bytes > scratches_bytes_) {
    // Those before may still use theirs.
    cuda::Pointer memory = 0;
    check(cuda_.allocate(&memory, whole_blocks(need.scratch_bytes)), "cuMemAlloc");
    scratches_.push_back(memory);
    scratches_bytes_ = need.scratch_bytes;
  }
  uint64_t run_one_batch = run_one_batch_;
  if (need.reduction != ReduceKind::none) {
    const std::lock_guard<std::mutex> adding(adding_);
    run_one_batch = reductions_.at({need.dtype, need.reduction}).run_one_batch;
  }
  const uint32_t parts = gpu::parts_of(std::min(need.segment_bytes, kGpuPayload));
  const uint32_t records = static_cast<uint32_t>(records_in_run(need.segment_bytes));
  // The results and the keys.
  const uint32_t spare = (need.results + 1 + gpu::kCommands - 1) / gpu::kCommands;
  const uint64_t first = prelaunched_->launch({run_one_batch, parts, parts * records}, need.commands + spare,
                                         reinterpret_cast<cuda::Handle>(need.stream));
  ++unfinished_;
  return {first, need.commands, spare,
          scratches_.empty() ? nullptr : reinterpret_cast<uint8_t*>(scratches_.back())};
}

uint32_t CudaDevice::mark_end() {
  const std::lock_guard<std::mutex> lock(preparing_);
  make_current();
  return prelaunched_->mark_end();
}

bool CudaDevice::is_done(uint32_t over) const { return prelaunched_->is_done(over); }

void CudaDevice::make_stream_wait(uint64_t stream, uint32_t over) const {
  make_current();
  prelaunched_->make_stream_wait(reinterpret_cast<cuda::Handle>(stream), over);
}

void CudaDevice::launch_rest() {
  const std::lock_guard<std::mutex> lock(preparing_);
  make_current();
  prelaunched_->launch_rest();
}

Device::Ticket CudaDevice::command(uint64_t queue, gpu::Action action, const Record& record,
                                   const uint8_t* local, uint8_t* result) {
  StagingSlot& slot = next_staging_slot();
  slot.opens = action != gpu::Action::seal;
  verdicts_[begun_ % kRoom] = kNothingFailed;
  // Sealed where it is to lie: a seal reads back nothing of what it wrote. Opened in private memory.
  const cuda::Pointer sealed = slot.opens ? slot.record : address(record.area.at);
  gpu::Command made{};
  made.launch = launch_of(record, sealed, slot.opens, local, result, parts_of_command());
  made.launch.action = action;
  if (slot.opens) made.wire = address(record.area.at);
  slot.batch = command_queue()->add(queue, made);
  return begun_++;
}

void CudaDevice::command_plain(uint64_t queue, gpu::Action action, uint8_t* into,
                               const uint8_t* from, size_t bytes, uint64_t argument) {
  gpu::Command made{};
  made.launch.local = address(from);
  made.launch.result = address(into);
  made.launch.bytes = bytes;
  made.launch.action = action;
  made.argument = argument;
  command_queue()->add(queue, made);
}

// All that was begun with the old one has been settled, or here, with messages, handed over in front of
// it. If the record does not prove authentic the old key stays, and nothing that comes under the new one
// opens.
void CudaDevice::command_key(int slot, const KeyBytes& key) {
  if (!prepared()) persistent_kernel_->submit_all();
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
  made.launch = launch_of({key_slots_, encoded, context, kKeyBytes, {}}, unwrapping_ + at, true, nullptr,
                          reinterpret_cast<uint8_t*>(keys_ + static_cast<size_t>(slot) * kKeyBytes),
                          parts_of_command());
  made.launch.action = gpu::Action::open;
  made.wire = address(wrapped_ + at);
  command_queue()->add(kNoQueue, made);
  command_queue()->submit_now();
}

void CudaDevice::poison_results(const Prepared& prepared,
                       std::span<const std::span<uint8_t>> results) noexcept {
  if (prepared.first <= over_) return;
  if (setting_.prepared.first != prepared.first) {  // it was never begun
    setting_.prepared = prepared;
    prelaunched_->begin(prepared.first, prepared.commands, prepared.spare);
  }
  prelaunched_->use_spare();
  poisoned_ = true;
  uint64_t queue = kNoQueue;
  for (const std::span<uint8_t>& result : results) {
    while (!prelaunched_->has_room()) ::usleep(kGlanceUs);
    command_plain(queue--, gpu::Action::fill, result.data(), nullptr, result.size(), kAllOnes);
  }
  // Whatever ends a collective has ended the group.
  command_plain(queue, gpu::Action::fill, reinterpret_cast<uint8_t*>(keys_), nullptr,
                key_bytes(), 0);
  prelaunched_->end();
  leave();
}

void CudaDevice::poison_message(std::span<uint8_t> result) noexcept {
  command_plain(kNoQueue, gpu::Action::fill, result.data(), nullptr, result.size(), kAllOnes);
  persistent_kernel_->finish();
}

void CudaDevice::stop_persistent_kernel() noexcept {
  command_plain(kNoQueue, gpu::Action::fill, reinterpret_cast<uint8_t*>(keys_), nullptr, key_bytes(), 0);
  persistent_kernel_->finish();
  persistent_kernel_->stop();
}

void CudaDevice::leave() noexcept {
  over_ = setting_.prepared.first;
  setting_.prepared = {};
  --unfinished_;
}

}  // namespace sealring
