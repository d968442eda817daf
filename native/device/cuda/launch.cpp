#include "device/cuda/launch.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace sealring::gpu {
namespace {

constexpr size_t kPartBytes = 32u << 10;
constexpr size_t kBlockBytes = 64;

}  // namespace

uint32_t parts_of(size_t record_bytes) {
  return static_cast<uint32_t>(
      std::clamp<size_t>((record_bytes + kPartBytes - 1) / kPartBytes, 1, kMaxParts));
}

uint32_t log_turns_of(size_t record_bytes, uint32_t parts) {
  const size_t part_blocks = (record_bytes / kBlockBytes + parts - 1) / parts;
  uint32_t log_turns = 0;
  while ((size_t{kThreads} << log_turns) < part_blocks) ++log_turns;
  return log_turns;
}

Launch launch_of(const Device::Record& record, const KeyTable& keys, cuda::Pointer sealed,
                 bool opens, const uint8_t* local, uint8_t* result, uint32_t parts,
                 uint64_t* failed) {
  Launch launch{};
  Wire& wire = opens ? launch.in : launch.out;
  wire.records = sealed;
  wire.key = keys.of(record.key);
  std::memcpy(wire.header, record.header.data(), kHeaderBytes);
  std::memcpy(launch.context, record.context.data(), kContextBytes);
  launch.local = cuda::address(local);
  launch.result = cuda::address(result);
  launch.bytes = record.length;
  launch.failed = cuda::address(failed);
  launch.record_bytes = static_cast<uint32_t>(kGpuPayload);
  launch.one = 1;
  launch.log_turns = log_turns_of(std::min(record.length, kGpuPayload), parts);
  return launch;
}

void launch(const cuda::Driver& driver, uint64_t function, uint32_t blocks, uint32_t threads,
            uint32_t cluster, const void* argument, cuda::Handle stream) {
  int capture = 0;
  cuda::check(driver.capture_status(stream, &capture), "cuStreamIsCapturing");
  if (capture != 0) {
    throw std::runtime_error(
        "a kernel of sealring cannot be part of a CUDA graph: each replay would use its nonces "
        "again");
  }
  cuda::LaunchAttribute attribute{};
  attribute.id = cuda::kClusterDimension;
  attribute.cluster = {cluster, 1, 1};
  const cuda::LaunchConfig config{{blocks, 1, 1}, {threads, 1, 1}, 0,
                                  stream,         &attribute,      cluster > 1 ? 1u : 0u};
  void* arguments[] = {const_cast<void*>(argument)};
  cuda::check(driver.launch(&config, reinterpret_cast<cuda::Handle>(function), arguments, nullptr),
              "cuLaunchKernelEx");
}

}  // namespace sealring::gpu
