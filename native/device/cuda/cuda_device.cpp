#include "device/cuda/cuda_device.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <stdexcept>

namespace sealring {
namespace {

using cuda::address;
using cuda::check;

constexpr uint32_t kPlainThreads = 256, kPlainBlocks = 1024;

}  // namespace

CudaDevice::CudaDevice(const cuda::Driver& driver, int ordinal, int world, uint64_t seal,
                       uint64_t open)
    : cuda_(driver), ordinal_(ordinal), seal_(seal), open_(open), keys_{0, keys_of_group(world)} {
  check(cuda_.retain_primary(&context_, ordinal), "cuDevicePrimaryCtxRetain");
  try {
    make_current();
    for (cuda::Handle& stream : compute_) stream = cuda::create_urgent_stream(cuda_);
    in_ = cuda::create_urgent_stream(cuda_);
    out_ = cuda::create_urgent_stream(cuda_);
    for (StagingSlot& slot : staging_) {
      check(cuda_.create_event(&slot.copied, cuda::kDisableTiming), "cuEventCreate");
      check(cuda_.create_event(&slot.computed, cuda::kDisableTiming), "cuEventCreate");
    }
    allocate_staging(kGpuPayload);
    check(cuda_.allocate(&keys_.at, cuda::whole_blocks(keys_.bytes())), "cuMemAlloc");
    verdicts_ = reinterpret_cast<uint64_t*>(take_pinned_memory(kRoom * sizeof(uint64_t)));
    held_ += cuda::whole_blocks(keys_.bytes()) + kRoom * sizeof(uint64_t);
  } catch (...) {
    release();
    throw;
  }
}

CudaDevice::~CudaDevice() {
  abandon();
  release();
}

void CudaDevice::release() noexcept {
  cuda_.set_current(context_);
  exchanges_.reset();
  commands_.reset();
  if (keys_.at != 0) {
    cuda_.fill(keys_.at, 0, keys_.bytes(), in_);
    cuda_.synchronize(in_);
    cuda_.release(keys_.at);
  }
  for (StagingSlot& slot : staging_) {
    for (cuda::Handle event : {slot.copied, slot.computed}) {
      if (event != nullptr) cuda_.destroy_event(event);
    }
  }
  for (cuda::Pointer area : reached_) cuda_.close_shared(area);
  for (uint8_t* memory : registered_) cuda_.unregister_host(memory);
  if (scratch_ != 0) cuda_.release_in(scratch_, in_), cuda_.synchronize(in_);
  if (staging_memory_ != 0) cuda_.release(staging_memory_);
  for (cuda::Pointer area : areas_) cuda_.release(area);
  for (cuda::Pointer scratch : scratches_) cuda_.release(scratch);
  for (const auto& [bytes, memory] : pinned_) cuda_.release_host(memory);
  if (verdicts_ != nullptr) cuda_.release_host(verdicts_);
  for (cuda::Handle stream : compute_) {
    if (stream != nullptr) cuda_.destroy_stream(stream);
  }
  for (cuda::Handle stream : {in_, out_}) {
    if (stream != nullptr) cuda_.destroy_stream(stream);
  }
  cuda_.release_primary(ordinal_);
}

void CudaDevice::make_current() const { check(cuda_.set_current(context_), "cuCtxSetCurrent"); }

bool CudaDevice::reached(uint64_t event) {
  if (event == 0) return true;
  const cuda::Result result = cuda_.query_event(reinterpret_cast<cuda::Handle>(event));
  if (result == cuda::kNotReady) return false;
  check(result, "cuEventQuery");
  return true;
}

void CudaDevice::add_reduction(DType dtype, ReduceKind kind, const Reduction& functions) {
  const std::lock_guard<std::mutex> lock(adding_);
  reductions_[{dtype, kind}] = functions;
}

CudaDevice::Reduction CudaDevice::reduction() const {
  const std::lock_guard<std::mutex> lock(adding_);
  const auto found = reductions_.find({setting_.dtype, setting_.reduction});
  if (found == reductions_.end()) throw std::logic_error("this reduction was not compiled");
  return found->second;
}

// Allocates ahead, so that a running collective finds its memory and makes no CUDA call.
void CudaDevice::reserve_pinned_memory(size_t bytes, size_t pieces) {
  make_current();
  for (;;) {
    {
      const std::lock_guard<std::mutex> lock(pinned_lock_);
      if (pinned_count_[bytes] >= pieces) return;
    }
    // Allocates outside the lock: CUDA may block here, and the group's thread must still get at the free
    // pieces.
    void* memory = nullptr;
    check(cuda_.allocate_host(&memory, bytes, cuda::kPortable), "cuMemHostAlloc");
    const std::lock_guard<std::mutex> lock(pinned_lock_);
    pinned_.emplace(bytes, static_cast<uint8_t*>(memory));
    ++pinned_count_[bytes];
  }
}

uint8_t* CudaDevice::take_pinned_memory(size_t bytes) {
  {
    const std::lock_guard<std::mutex> lock(pinned_lock_);
    if (const auto found = pinned_.find(bytes); found != pinned_.end()) {
      uint8_t* const memory = found->second;
      pinned_.erase(found);
      return memory;
    }
  }
  make_current();
  void* memory = nullptr;
  check(cuda_.allocate_host(&memory, bytes, cuda::kPortable), "cuMemHostAlloc");
  return static_cast<uint8_t*>(memory);
}

void CudaDevice::free_pinned_memory(uint8_t* memory) {
  cuda_.set_current(context_);
  cuda_.release_host(memory);
}

size_t CudaDevice::memory_bytes() const {
  size_t bytes = staging_bytes_ + held_ + (commands_ ? commands_->memory_bytes() : 0);
  const std::lock_guard<std::mutex> lock(pinned_lock_);
  for (const auto& [size, memory] : pinned_) bytes += size;
  return bytes;
}

// ---- staging slots ------------------------------------------------------------------------------------

// Called between two collectives, when nothing is under way.
void CudaDevice::make_room(size_t payload) {
  make_current();
  const cuda::Pointer before = staging_memory_;
  allocate_staging(payload);
  check(cuda_.release(before), "cuMemFree");
}

void CudaDevice::allocate_staging(size_t payload) {
  cuda::Pointer memory = 0;
  check(cuda_.allocate(&memory, kRoom * run_stride(payload)), "cuMemAlloc");
  staging_memory_ = memory;
  staging_bytes_ = kRoom * run_stride(payload);
  for (size_t i = 0; i < kRoom; ++i) staging_[i].record = staging_memory_ + i * run_stride(payload);
}

// ---- keys --------------------------------------------------------------------------------------

int CudaDevice::add_key(const KeyBytes& key) {
  if (key_count_ == keys_.slots) throw std::logic_error("more keys than a group has");
  // The slot is new, so nothing under way uses it.
  if (CommandBatches* const commands = running_commands()) {
    commands->replace_key(key_count_, key);
  } else {
    put_key(key_count_, key);
  }
  return key_count_++;
}

// This is so rare that it can wait for everything that may still use the old key.
void CudaDevice::replace_key(int slot, const KeyBytes& key) {
  if (CommandBatches* const commands = running_commands()) return commands->replace_key(slot, key);
  for (cuda::Handle stream : compute_) check(cuda_.synchronize(stream), "cuStreamSynchronize");
  put_key(slot, key);
}

void CudaDevice::put_key(int slot, const KeyBytes& key) {
  check(cuda_.to_device(keys_.of(slot), key.data(), key.size(), in_), "cuMemcpyHtoDAsync");
  check(cuda_.synchronize(in_), "cuStreamSynchronize");
}

void CudaDevice::wipe() {
  if (commands_) commands_->wipe_wrapping_key();
  // Streams wait for results that are still to come, and CUDA calls here could wait for those streams. The
  // results will be poisoned and the keys wiped with them.
  if (commands_ && commands_->busy()) return;
  abandon();
  // The areas' owners may free them from now on. Closing them makes CUDA wait until the GPU is idle.
  if (!PersistentKernel::any_running()) {
    for (cuda::Pointer area : reached_) cuda_.close_shared(area);
    reached_.clear();
  }
  cuda_.fill(keys_.at, 0, keys_.bytes(), in_);
  cuda_.synchronize(in_);
}

// ---- a collective ------------------------------------------------------------------------------

void CudaDevice::begin(const Setting& setting) {
  setting_ = setting;
  if (commands_ && commands_->keys_wiped()) throw std::logic_error("the keys are gone");
  if (exchanges_) exchanges_->begin(setting.submitted.exchanges);
  if (prelaunched()) {
    const uint32_t parts = gpu::parts_of(std::min(setting.segment_bytes, kGpuPayload));
    return prelaunched_->begin(setting.submitted, parts);
  }
  make_current();
  for (cuda::Handle stream : compute_) {
    if (setting.ready == 0) break;
    check(cuda_.wait_event(stream, reinterpret_cast<cuda::Handle>(setting.ready), 0),
          "cuStreamWaitEvent");
  }
  if (setting.scratch_bytes > scratch_bytes_) {
    // None of our work is under way between two collectives. Streams of the script may be, and may wait for
    // this collective. So calls that wait until the whole GPU is idle are not used here.
    if (scratch_ != 0) check(cuda_.release_in(scratch_, in_), "cuMemFreeAsync");
    scratch_ = 0, scratch_bytes_ = 0;
    check(cuda_.allocate_in(&scratch_, setting.scratch_bytes, in_), "cuMemAllocAsync");
    check(cuda_.synchronize(in_), "cuStreamSynchronize");
    scratch_bytes_ = setting.scratch_bytes;
  }
}

void CudaDevice::end() {
  if (prelaunched()) return prelaunched_->end();
  for (cuda::Handle stream : compute_) check(cuda_.synchronize(stream), "cuStreamSynchronize");
}

void CudaDevice::abandon() noexcept {
  // Exchanges with a peer that is gone would wait for ever.
  if (exchanges_) exchanges_->abandon();
  if (CommandBatches* const commands = running_commands()) {
    commands->abandon();
    settled_ = begun_;
    return;
  }
  cuda_.set_current(context_);
  cuda_.synchronize(in_);
  for (cuda::Handle stream : compute_) cuda_.synchronize(stream);
  cuda_.synchronize(out_);
  settled_ = begun_;
}

CudaDevice::StagingSlot& CudaDevice::next_staging_slot() {
  if (begun_ - settled_ == kRoom)
    throw std::logic_error("more records than the device has staging slots for");
  return staging_[begun_ % kRoom];
}

Device::Ticket CudaDevice::seal(uint64_t queue, const Record& record, const uint8_t* plain) {
  if (running_commands() != nullptr)
    return command(queue, gpu::Action::seal, record, plain, nullptr);
  StagingSlot& slot = next_staging_slot();
  const cuda::Handle stream = stream_of(queue);
  // The slot's last user is settled, so the slot is free. In a device's memory a run may be built in place,
  // though others can write there: sealing never reads back what it wrote.
  const cuda::Pointer sealed = record.area.on_device ? address(record.area.at) : slot.record;
  run_kernel(stream, seal_, record, sealed, false, plain, nullptr);
  check(cuda_.record_event(slot.computed, stream), "cuEventRecord");
  slot.opens = false;
  slot.done = slot.computed;
  if (record.area.on_device) return begun_++;
  check(cuda_.wait_event(out_, slot.computed, 0), "cuStreamWaitEvent");
  check(cuda_.to_host(record.area.at, slot.record, sealed_run_bytes(record.length), out_),
        "cuMemcpyDtoHAsync");
  check(cuda_.record_event(slot.copied, out_), "cuEventRecord");
  slot.done = slot.copied;
  return begun_++;
}

Device::Ticket CudaDevice::open(uint64_t queue, const Record& record, uint8_t* into, bool reduces) {
  if (running_commands() != nullptr) {
    return command(queue, reduces ? gpu::Action::open_reduce : gpu::Action::open, record,
                   reduces ? into : nullptr, into);
  }
  StagingSlot& slot = next_staging_slot();
  const cuda::Handle stream = stream_of(queue);
  const cuda::Pointer sealed = record.area.is_private ? address(record.area.at) : slot.record;
  if (!record.area.is_private) {
    // The run is copied once, into memory that no other process can write. The copy is both checked and used.
    const size_t bytes = sealed_run_bytes(record.length);
    check(cuda_.copy(slot.record, address(record.area.at), bytes, in_), "cuMemcpyAsync");
    check(cuda_.record_event(slot.copied, in_), "cuEventRecord");
    check(cuda_.wait_event(stream, slot.copied, 0), "cuStreamWaitEvent");
  }
  verdicts_[begun_ % kRoom] = kNothingFailed;
  run_kernel(stream, reduces ? reduction().open_reduce : open_, record, sealed, true,
             reduces ? into : nullptr, into);
  check(cuda_.record_event(slot.computed, stream), "cuEventRecord");
  slot.done = slot.computed;
  slot.opens = true;
  return begun_++;
}

Device::State CudaDevice::settle(Ticket ticket) {
  if (ticket != settled_) throw std::logic_error("tickets are settled in order");
  const StagingSlot& slot = staging_[ticket % kRoom];
  if (CommandBatches* const commands = running_commands()) {
    commands->submit();
    if (!commands->batch_done(slot.batch)) return State::pending;
  } else {
    const cuda::Result result = cuda_.query_event(slot.done);
    if (result == cuda::kNotReady) return State::pending;
    check(result, "cuEventQuery");
  }
  ++settled_;
  if (!slot.opens) return State::done;
  const volatile uint64_t* verdict = &verdicts_[ticket % kRoom];
  return *verdict == kNothingFailed ? State::done : State::refused;
}

void CudaDevice::run_kernel(cuda::Handle stream, uint64_t function, const Record& record,
                            cuda::Pointer sealed, bool opens, const uint8_t* local,
                            uint8_t* result) {
  const uint32_t parts = gpu::parts_of(std::min(record.length, kGpuPayload));
  const gpu::Launch launch = gpu::launch_of(record, keys_, sealed, opens, local, result, parts,
                                            &verdicts_[begun_ % kRoom]);
  const uint32_t records = static_cast<uint32_t>(records_in_run(record.length));
  gpu::launch(cuda_, function, records * parts, gpu::kThreads, parts, &launch, stream);
}

// ---- what a program computes by itself ---------------------------------------------------------

void CudaDevice::run_plain(cuda::Handle stream, uint64_t function, void** arguments, size_t bytes) {
  const size_t blocks = (bytes + kPlainThreads - 1) / kPlainThreads;
  const cuda::LaunchConfig config{
      {static_cast<unsigned>(std::min<size_t>(blocks, kPlainBlocks)), 1, 1},
      {kPlainThreads, 1, 1},
      0,
      stream,
      nullptr,
      0};
  check(cuda_.launch(&config, reinterpret_cast<cuda::Handle>(function), arguments, nullptr),
        "cuLaunchKernelEx");
}

void CudaDevice::copy(uint64_t queue, uint8_t* into, const uint8_t* from, size_t bytes) {
  if (prelaunched()) return command_plain(queue, gpu::Action::copy, into, from, bytes);
  check(cuda_.on_device(address(into), address(from), bytes, stream_of(queue)),
        "cuMemcpyDtoDAsync");
}

void CudaDevice::reduce(uint64_t queue, uint8_t* into, const uint8_t* from, size_t bytes) {
  if (prelaunched()) return command_plain(queue, gpu::Action::reduce, into, from, bytes);
  uint64_t size = bytes;
  void* arguments[] = {&into, &from, &size};
  run_plain(stream_of(queue), reduction().reduce, arguments, bytes);
}

void CudaDevice::average(uint64_t queue, uint8_t* into, size_t bytes) {
  if (prelaunched())
    return command_plain(queue, gpu::Action::average, into, nullptr, bytes, setting_.world);
  uint64_t size = bytes;
  uint32_t world = setting_.world;
  void* arguments[] = {&into, &size, &world};
  run_plain(stream_of(queue), reduction().average, arguments, bytes);
}

void CudaDevice::premultiply(uint64_t queue, uint8_t* into, size_t bytes) {
  if (prelaunched())
    return command_plain(queue, gpu::Action::premultiply, into, nullptr, bytes,
                         std::bit_cast<uint64_t>(setting_.factor));
  uint64_t size = bytes;
  double factor = setting_.factor;
  void* arguments[] = {&into, &size, &factor};
  run_plain(stream_of(queue), reduction().premultiply, arguments, bytes);
}

}  // namespace sealring
