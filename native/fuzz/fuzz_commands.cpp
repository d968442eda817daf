// Batches of commands as a GPU gets them, run by the CPU: from a changed record nothing is written, and its
// failure flag is set.
#include "device/cuda/launch.hpp"
#include "script.hpp"
#include "stand_ins/host_driver.hpp"

using namespace sealring;
using namespace sealring::fuzz;

namespace {

constexpr uint8_t kUntouched = 0xee;

struct Work {
  Sent sent;
  gpu::Command command{};
  std::vector<uint8_t> wire, own, result;
  uint64_t failed = 1;
  KeyBytes key;
};

void prepare(Work& work, const Line& line) {
  Sealer sealer(0, 2);
  std::array<uint8_t, kLineBytes> bytes;
  std::memcpy(bytes.data(), line.bytes, kLineBytes);
  // The host checks a header before it gives the record to the GPU, so the header is right here.
  bytes[kFlagsAt] &= kWrongKey;
  bytes[kHeaderAt + 3] = 0;
  std::memset(bytes.data() + kHeaderAt + 16, 0, 4);
  bytes[kHeaderAt + 16] = kGpuLane;
  std::memset(bytes.data() + kCutAt, 0, 2);
  work.sent = sealer.seal(Line(bytes.data()), 1);
  work.wire = work.sent.bytes;
  work.own.assign(work.wire.size(), 0);
  work.result.assign(work.sent.plain.size(), kUntouched);
  work.key = gpu_key(testing::pair_key(1, 0));
  gpu::Launch& launch = work.command.launch;
  launch.action = gpu::Action::open;
  launch.bytes = work.sent.plain.size();
  launch.record_bytes = kGpuPayload;
  launch.in.records = cuda::address(work.own.data());
  launch.in.key = cuda::address(work.key.data());
  work.sent.header.encode(launch.in.header);
  launch.result = cuda::address(work.result.data());
  launch.failed = cuda::address(&work.failed);
  work.command.wire = cuda::address(work.wire.data());
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static HostStream stream;
  const std::vector<Line> lines = lines_of({data, size});
  const size_t count = std::min<size_t>(lines.size(), gpu::kCommands);
  if (count == 0) return 0;
  std::array<Work, gpu::kCommands> works;
  gpu::Batch batch{};
  batch.number = 1;
  batch.count = static_cast<uint32_t>(count);
  for (size_t i = 0; i < count; ++i) {
    prepare(works[i], lines[i]);
    batch.commands[i] = works[i].command;
  }
  uint32_t arrived = 0, done = 0;
  const gpu::BatchArgument argument{cuda::address(&batch), cuda::address(&arrived),
                                    cuda::address(&done), 1, 1};
  gpu::launch(host_driver(), host_function(HostKernel::run_one_batch), 1, 1, 1, &argument, &stream);
  stream.synchronize();
  require(done == 1);
  for (size_t i = 0; i < count; ++i) {
    const Work& work = works[i];
    require((work.failed == 0) == !work.sent.authentic);
    for (const uint8_t byte : work.result) {
      require(byte == (work.sent.authentic ? lines[i].fill() : kUntouched));
    }
  }
  return 0;
}
