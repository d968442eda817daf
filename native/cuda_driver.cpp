#include "cuda_driver.hpp"

#include <dlfcn.h>

#include <stdexcept>
#include <string>

namespace sealring::cuda {
namespace {

Driver load() {
  void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) throw std::runtime_error("CUDA's driver, libcuda.so.1, is not installed");
  const auto look_for = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
  };
  const auto find = [&](auto& function, const char* name) {
    look_for(function, name);
    if (function == nullptr) {
      throw std::runtime_error(std::string("CUDA's driver is too old: it has no ") + name);
    }
  };
  Driver out;
  find(out.init, "cuInit");
  find(out.retain_primary, "cuDevicePrimaryCtxRetain");
  find(out.release_primary, "cuDevicePrimaryCtxRelease_v2");
  find(out.set_current, "cuCtxSetCurrent");
  find(out.priority_range, "cuCtxGetStreamPriorityRange");
  find(out.create_stream, "cuStreamCreateWithPriority");
  find(out.destroy_stream, "cuStreamDestroy_v2");
  find(out.synchronize, "cuStreamSynchronize");
  find(out.query_stream, "cuStreamQuery");
  find(out.wait_event, "cuStreamWaitEvent");
  find(out.create_event, "cuEventCreate");
  find(out.destroy_event, "cuEventDestroy_v2");
  find(out.record_event, "cuEventRecord");
  find(out.query_event, "cuEventQuery");
  find(out.allocate, "cuMemAlloc_v2");
  find(out.release, "cuMemFree_v2");
  find(out.allocate_in, "cuMemAllocAsync");
  find(out.release_in, "cuMemFreeAsync");
  find(out.allocate_host, "cuMemHostAlloc");
  find(out.release_host, "cuMemFreeHost");
  find(out.to_device, "cuMemcpyHtoDAsync_v2");
  find(out.to_host, "cuMemcpyDtoHAsync_v2");
  find(out.on_device, "cuMemcpyDtoDAsync_v2");
  find(out.copy, "cuMemcpyAsync");
  find(out.register_host, "cuMemHostRegister_v2");
  find(out.unregister_host, "cuMemHostUnregister");
  find(out.share, "cuIpcGetMemHandle");
  find(out.open_shared, "cuIpcOpenMemHandle_v2");
  find(out.close_shared, "cuIpcCloseMemHandle");
  find(out.fill, "cuMemsetD8Async");
  find(out.launch, "cuLaunchKernelEx");
  look_for(out.wait_value, "cuStreamWaitValue32_v2");
  look_for(out.loading_mode, "cuModuleGetLoadingMode");
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

}  // namespace sealring::cuda
