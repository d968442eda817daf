#include "device/cuda/launch.hpp"

#include <algorithm>

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

void launch(const cuda::Driver& driver, uint64_t function, uint32_t blocks, uint32_t threads,
            uint32_t cluster, const void* argument, cuda::Handle stream) {
  cuda::LaunchAttribute attribute{};
  attribute.id = cuda::kClusterDimension;
  attribute.cluster = {cluster, 1, 1};
  const cuda::LaunchConfig config{
      {blocks, 1, 1}, {threads, 1, 1}, 0, stream, &attribute, cluster > 1 ? 1u : 0u};
  void* arguments[] = {const_cast<void*>(argument)};
  cuda::check(
      driver.launch(&config, reinterpret_cast<cuda::Handle>(function), arguments, nullptr),
      "cuLaunchKernelEx");
}

}  // namespace sealring::gpu
