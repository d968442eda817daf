// Memory through which GPUs of different processes hand each other records, and the start of exchanges.
#include <cstring>
#include <stdexcept>

#include "device/channels.hpp"
#include "device/cuda/cuda_device.hpp"

namespace sealring {
namespace {

using cuda::address;
using cuda::check;

}  // namespace

Device::Area CudaDevice::own_area(size_t bytes) {
  make_current();
  cuda::Pointer memory = 0;
  check(cuda_.allocate(&memory, cuda::whole_blocks(bytes)), "cuMemAlloc");
  areas_.push_back(memory);
  // It may hold an old tensor, which other processes must not see.
  check(cuda_.fill(memory, 0, cuda::whole_blocks(bytes), in_), "cuMemsetD8Async");
  check(cuda_.synchronize(in_), "cuStreamSynchronize");
  return {reinterpret_cast<uint8_t*>(memory), true};
}

Device::Area CudaDevice::share(size_t bytes, std::vector<uint8_t>& handle) {
  const Area area = own_area(bytes);
  cuda::IpcHandle found{};
  check(cuda_.share(&found, address(area.at)), "cuIpcGetMemHandle");
  handle.assign(found.bytes, found.bytes + sizeof found.bytes);
  return area;
}

Device::Area CudaDevice::reach(std::span<const uint8_t> handle) {
  make_current();
  cuda::IpcHandle wanted{};
  if (handle.size() != sizeof wanted.bytes) throw std::runtime_error("no handle of CUDA's");
  std::memcpy(wanted.bytes, handle.data(), handle.size());
  cuda::Pointer memory = 0;
  check(cuda_.open_shared(&memory, wanted, cuda::kLazyPeerAccess), "cuIpcOpenMemHandle");
  reached_.push_back(memory);
  return {reinterpret_cast<uint8_t*>(memory), true};
}

Device::Area CudaDevice::reach_host(uint8_t* memory, size_t bytes) {
  make_current();
  check(cuda_.register_host(memory, bytes, cuda::kPortable), "cuMemHostRegister");
  registered_.push_back(memory);
  return {memory};
}

std::vector<uint8_t> CudaDevice::new_meeting_id(int world) {
  // An NCCL kernel waits on the GPU until the other ranks have come. With lazy loading, loading another
  // kernel meanwhile makes the driver wait for the GPU, and blocks the thread that would bring this rank
  // there.
  int mode = cuda::kEagerLoading;
  if (cuda_.loading_mode != nullptr) check(cuda_.loading_mode(&mode), "cuModuleGetLoadingMode");
  if (mode != cuda::kEagerLoading) {
    throw std::runtime_error("set CUDA_MODULE_LOADING=EAGER before the process starts");
  }
  std::vector<uint8_t> ids;  // an id for each channel
  for (size_t channel = 0; channel < Channels(world).count(); ++channel) {
    const auto id = nccl::new_id(cuda_.nccl());
    ids.insert(ids.end(), id.begin(), id.end());
  }
  return ids;
}

void CudaDevice::begin_meeting(std::span<const uint8_t> id, int rank, int world) {
  make_current();
  exchanges_ = std::make_unique<CudaExchanges>(cuda_, context_, id, rank, world);
}

void CudaDevice::begin_connecting(const std::vector<int>& peers) { exchanges_->connect(peers); }

}  // namespace sealring
