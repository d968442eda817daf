// The part of CudaDevice for operations that streams wait for: writes their commands to memory
// (device/command_queue.hpp).
#include <algorithm>
#include <stdexcept>

#include "device/cuda/cuda_device.hpp"

namespace sealring {

using cuda::address;
using cuda::check;

void CudaDevice::enable_prelaunch(uint64_t run_one_batch) {
  make_current();
  run_one_batch_ = run_one_batch;
  auto kernels = std::make_unique<PrelaunchedKernels>(gpu::Gpu{cuda_, context_, keys_});
  prelaunched_ = kernels.get();
  commands_ = std::move(kernels);
}

void CudaDevice::enable_persistent_kernel(uint64_t run_all_batches) {
  make_current();
  commands_ = std::make_unique<PersistentKernel>(gpu::Gpu{cuda_, context_, keys_}, run_all_batches,
                                                 gpu::parts_of(kGpuPayload));
}

Submitted CudaDevice::submit(const Need& need) {
  launch_rest();  // for a collective whose caller was interrupted
  const std::lock_guard<std::mutex> lock(submitting_);
  if (prelaunched_ == nullptr) throw std::logic_error("enable_prelaunch() was not called");
  make_current();
  if (need.scratch_bytes > scratches_bytes_) {
    // Earlier collectives may still use the smaller blocks.
    cuda::Pointer memory = 0;
    check(cuda_.allocate(&memory, cuda::whole_blocks(need.scratch_bytes)), "cuMemAlloc");
    scratches_.push_back(memory);
    scratches_bytes_ = need.scratch_bytes;
  }
  uint64_t function = run_one_batch_;
  if (need.reduction != ReduceKind::none) {
    const std::lock_guard<std::mutex> adding(adding_);
    function = reductions_.at({need.dtype, need.reduction}).run_one_batch;
  }
  const uint32_t parts = gpu::parts_of(std::min(need.segment_bytes, kGpuPayload));
  const uint32_t records = static_cast<uint32_t>(records_in_run(need.segment_bytes));
  // For poisoning the results and wiping the keys.
  const uint32_t spare = (need.results + 1 + gpu::kCommands - 1) / gpu::kCommands;
  Submitted out =
      prelaunched_->launch({function, parts, parts * records}, need.commands, spare, need.stream);
  if (out.number == 0) return {};
  if (!scratches_.empty()) out.scratch = reinterpret_cast<uint8_t*>(scratches_.back());
  out.exchanges = !need.rounds.empty();
  if (out.exchanges) exchanges_->plan(need.rounds);
  return out;
}

// Launches kernels and exchanges in a fixed order, so a call that blocks here waits only for earlier
// launches.
void CudaDevice::launch_rest() {
  if (prelaunched_ == nullptr) return;
  if (exchanges_) {
    make_current();
    exchanges_->launch_planned([this](uint32_t kernels) { prelaunched_->launch_up_to(kernels); });
  }
  prelaunched_->launch_rest();
}

Device::Ticket CudaDevice::command(uint64_t queue, gpu::Action action, const Record& record,
                                   const uint8_t* local, uint8_t* result) {
  StagingSlot& slot = next_staging_slot();
  slot.opens = action != gpu::Action::seal;
  uint64_t* const verdict = &verdicts_[begun_ % kRoom];
  *verdict = kNothingFailed;
  // A record is sealed directly in its final place: sealing never reads back what it wrote. It is opened in
  // private memory.
  const bool fetches = slot.opens && !record.area.is_private;
  const cuda::Pointer sealed = fetches ? slot.record : address(record.area.at);
  gpu::Command made{};
  made.launch =
      gpu::launch_of(record, keys_, sealed, slot.opens, local, result, commands_->parts(), verdict);
  made.launch.action = action;
  if (fetches) made.wire = address(record.area.at);
  slot.batch = commands_->add(queue, made);
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
  commands_->add(queue, made);
}

}  // namespace sealring
