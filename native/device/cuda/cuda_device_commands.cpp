// Collectives that the GPU was given ahead, and messages that streams wait for: its part is told to it
// through memory (commands.hpp).
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

void CudaDevice::hire(uint64_t serve) {
  make_current();
  serve_ = serve;
  shifts_ = std::make_unique<Shifts>(cuda_);
  make_wrapping();
}

void CudaDevice::employ_porter(uint64_t carry) {
  make_current();
  porter_ = std::make_unique<Porter>(cuda_, carry, gpu::parts_of(kGpuPayload));
  make_wrapping();
}

void CudaDevice::make_wrapping() {
  const size_t wrapped = static_cast<size_t>(key_slots_) * kWrappedStride;
  wrapped_ = take_host_memory(wrapped);
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
  if (!shifts_) throw std::logic_error("nobody was hired");
  make_current();
  if (need.scratch_bytes > scratches_bytes_) {
    // Those before may still use theirs.
    cuda::Pointer memory = 0;
    check(cuda_.allocate(&memory, whole_blocks(need.scratch_bytes)), "cuMemAlloc");
    scratches_.push_back(memory);
    scratches_bytes_ = need.scratch_bytes;
  }
  uint64_t serve = serve_;
  if (need.reduction != ReduceKind::none) {
    const std::lock_guard<std::mutex> adding(adding_);
    serve = reductions_.at({need.dtype, need.reduction}).serve;
  }
  const uint32_t parts = gpu::parts_of(std::min(need.segment_bytes, kGpuPayload));
  const uint32_t records = static_cast<uint32_t>(records_in_run(need.segment_bytes));
  // The results and the keys.
  const uint32_t kept = (need.results + 1 + gpu::kCommands - 1) / gpu::kCommands;
  const uint64_t first = shifts_->launch({serve, parts, parts * records}, need.commands + kept,
                                         reinterpret_cast<cuda::Handle>(need.stream));
  ++unfinished_;
  return {first, need.commands, kept,
          scratches_.empty() ? nullptr : reinterpret_cast<uint8_t*>(scratches_.back())};
}

uint32_t CudaDevice::mark_over() {
  const std::lock_guard<std::mutex> lock(preparing_);
  make_current();
  return shifts_->mark_over();
}

bool CudaDevice::is_over(uint32_t over) const { return shifts_->is_over(over); }

void CudaDevice::hold(uint64_t stream, uint32_t over) const {
  make_current();
  shifts_->hold(reinterpret_cast<cuda::Handle>(stream), over);
}

void CudaDevice::prepare_rest() {
  const std::lock_guard<std::mutex> lock(preparing_);
  make_current();
  shifts_->launch_rest();
}

Device::Ticket CudaDevice::command(uint64_t queue, gpu::Action action, const Record& record,
                                   const uint8_t* local, uint8_t* result) {
  Berth& berth = next_berth();
  berth.opens = action != gpu::Action::seal;
  verdicts_[begun_ % kRoom] = kNothingFailed;
  // Sealed where it is to lie: a seal reads back nothing of what it wrote. Opened in private memory.
  const cuda::Pointer sealed = berth.opens ? berth.record : address(record.area.at);
  gpu::Command made{};
  made.launch = launch_of(record, sealed, berth.opens, local, result, parts_of_command());
  made.launch.action = action;
  if (berth.opens) made.wire = address(record.area.at);
  berth.batch = told()->add(queue, made);
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
  told()->add(queue, made);
}

// All that was begun with the old one has been settled, or here, with messages, handed over in front of
// it. If the record does not prove authentic the old key stays, and nothing that comes under the new one
// opens.
void CudaDevice::command_key(int slot, const KeyBytes& key) {
  if (!prepared()) porter_->hand_over_all();
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
  told()->add(kNoQueue, made);
  told()->hand_over_now();
}

void CudaDevice::spoil(const Prepared& prepared,
                       std::span<const std::span<uint8_t>> results) noexcept {
  if (prepared.first <= over_) return;
  if (setting_.prepared.first != prepared.first) {  // it was never begun
    setting_.prepared = prepared;
    shifts_->begin(prepared.first, prepared.commands, prepared.kept);
  }
  shifts_->use_kept();
  spoilt_ = true;
  uint64_t queue = kNoQueue;
  for (const std::span<uint8_t>& result : results) {
    while (!shifts_->has_room()) ::usleep(kGlanceUs);
    command_plain(queue--, gpu::Action::fill, result.data(), nullptr, result.size(), kAllOnes);
  }
  // Whatever ends a collective has ended the group.
  command_plain(queue, gpu::Action::fill, reinterpret_cast<uint8_t*>(keys_), nullptr,
                key_bytes(), 0);
  shifts_->end();
  leave();
}

void CudaDevice::spoil_message(std::span<uint8_t> result) noexcept {
  command_plain(kNoQueue, gpu::Action::fill, result.data(), nullptr, result.size(), kAllOnes);
  porter_->finish();
}

void CudaDevice::dismiss_porter() noexcept {
  command_plain(kNoQueue, gpu::Action::fill, reinterpret_cast<uint8_t*>(keys_), nullptr, key_bytes(), 0);
  porter_->finish();
  porter_->leave();
}

void CudaDevice::leave() noexcept {
  over_ = setting_.prepared.first;
  setting_.prepared = {};
  --unfinished_;
}

}  // namespace sealring
