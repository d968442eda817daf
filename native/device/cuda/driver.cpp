#include "device/cuda/driver.hpp"

#include <stdexcept>
#include <string>

#include "device/cuda/nccl.hpp"
#include "device/cuda/shared_library.hpp"

namespace sealring::cuda {
namespace {

Driver load() {
  const SharedLibrary library("CUDA's driver", "libcuda.so.1");
  Driver out;
  library.find(out.init, "cuInit");
  library.find(out.retain_primary, "cuDevicePrimaryCtxRetain");
  library.find(out.release_primary, "cuDevicePrimaryCtxRelease_v2");
  library.find(out.set_current, "cuCtxSetCurrent");
  library.find(out.priority_range, "cuCtxGetStreamPriorityRange");
  library.find(out.create_stream, "cuStreamCreateWithPriority");
  library.find(out.destroy_stream, "cuStreamDestroy_v2");
  library.find(out.synchronize, "cuStreamSynchronize");
  library.find(out.query_stream, "cuStreamQuery");
  library.find(out.capture_status, "cuStreamIsCapturing");
  library.find(out.wait_event, "cuStreamWaitEvent");
  library.find(out.create_event, "cuEventCreate");
  library.find(out.destroy_event, "cuEventDestroy_v2");
  library.find(out.record_event, "cuEventRecord");
  library.find(out.query_event, "cuEventQuery");
  library.find(out.allocate, "cuMemAlloc_v2");
  library.find(out.release, "cuMemFree_v2");
  library.find(out.allocate_in, "cuMemAllocAsync");
  library.find(out.release_in, "cuMemFreeAsync");
  library.find(out.allocate_host, "cuMemHostAlloc");
  library.find(out.release_host, "cuMemFreeHost");
  library.find(out.to_device, "cuMemcpyHtoDAsync_v2");
  library.find(out.to_host, "cuMemcpyDtoHAsync_v2");
  library.find(out.on_device, "cuMemcpyDtoDAsync_v2");
  library.find(out.copy, "cuMemcpyAsync");
  library.find(out.register_host, "cuMemHostRegister_v2");
  library.find(out.unregister_host, "cuMemHostUnregister");
  library.find(out.share, "cuIpcGetMemHandle");
  library.find(out.open_shared, "cuIpcOpenMemHandle_v2");
  library.find(out.close_shared, "cuIpcCloseMemHandle");
  library.find(out.fill, "cuMemsetD8Async");
  library.find(out.launch, "cuLaunchKernelEx");
  library.look_for(out.wait_value, "cuStreamWaitValue32_v2");
  library.look_for(out.write_value, "cuStreamWriteValue32_v2");
  library.look_for(out.loading_mode, "cuModuleGetLoadingMode");
  out.nccl = nccl::library;
  check(out.init(0), "cuInit");
  return out;
}

}  // namespace

const Driver& driver() {
  static const Driver loaded = load();
  return loaded;
}

void check(Result result, const char* what) {
  if (result == kSuccess) return;
  throw std::runtime_error(std::string("CUDA failed in ") + what + ": error " +
                           std::to_string(result));
}

Handle create_urgent_stream(const Driver& driver) {
  int least = 0, greatest = 0;
  check(driver.priority_range(&least, &greatest), "cuCtxGetStreamPriorityRange");
  Handle stream = nullptr;
  check(driver.create_stream(&stream, kNonBlocking, greatest), "cuStreamCreateWithPriority");
  return stream;
}

}  // namespace sealring::cuda
