// Prelaunched kernels, played by a kernel that notes its commands: every command runs once, a queue's
// commands run in order, and a kernel that is not needed blocks nothing.

#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <stdexcept>
#include <thread>
#include <vector>

#include "check.hpp"
#include "device/cuda/key_memory.hpp"
#include "device/cuda/prelaunched_kernels.hpp"
#include "stand_ins/host_driver.hpp"

using namespace sealring;

namespace {

using Stream = HostStream;

std::vector<uint64_t> commands_run;  // the commands' arguments, in the order in which they ran

std::atomic_ref<uint32_t> number_at(cuda::Pointer at) {
  return std::atomic_ref<uint32_t>(*reinterpret_cast<uint32_t*>(at));
}

// Does what engine/cuda/prelaunched_kernel.hpp does, without the commands themselves.
void run_one_batch(const gpu::BatchArgument& argument) {
  const auto* const batch = reinterpret_cast<const gpu::Batch*>(argument.batch);
  // If this kernel got no batch, the host may already write the next batch to this place.
  if (number_at(argument.batch).load(std::memory_order_acquire) != argument.number) return;
  for (uint32_t i = 0; i < batch->count; ++i) commands_run.push_back(batch->commands[i].argument);
  number_at(argument.done).store(argument.number, std::memory_order_release);
}

KeyBytes given_back;  // the first bytes of the memory last freed in a stream's order

cuda::Driver noting() {
  cuda::Driver out = host_driver();
  out.release_in = [](cuda::Pointer gone, cuda::Handle stream) {
    static_cast<Stream*>(stream)->put([gone] {
      std::memcpy(given_back.data(), reinterpret_cast<const void*>(gone), given_back.size());
    });
    return host_driver().release_in(gone, stream);
  };
  out.launch = [](const cuda::LaunchConfig* config, cuda::Handle, void** arguments, void**) {
    const gpu::BatchArgument argument = *static_cast<const gpu::BatchArgument*>(arguments[0]);
    static_cast<Stream*>(config->stream)->put([argument] { run_one_batch(argument); });
    return 0;
  };
  return out;
}

const cuda::Driver& driver() {
  static const cuda::Driver made = noting();
  return made;
}

gpu::Command command(uint64_t argument) {
  gpu::Command out{};
  out.argument = argument;
  return out;
}

constexpr PrelaunchedKernels::KernelShape kShape{1, 1, 1};

// The keys are never read, because no command is run.
struct Kernels : PrelaunchedKernels {
  Kernels() : PrelaunchedKernels({driver(), nullptr, {cuda::address(keys().data()), 1}}) {}
  static std::array<uint8_t, 2 * kKeyBytes>& keys() {
    static std::array<uint8_t, 2 * kKeyBytes> memory;
    return memory;
  }
};

uint64_t handle(Stream& stream) { return reinterpret_cast<uint64_t>(&stream); }

// Runs a collective of `commands` commands: this thread hands them over while another launches the rest.
void run_collective(Kernels& kernels, Stream& user, uint32_t commands, uint32_t spare,
                    uint64_t base, std::mt19937& random) {
  const Submitted call = kernels.launch(kShape, commands + spare, 0, handle(user));
  std::thread caller([&] {
    kernels.launch_rest();
    kernels.mark_end(call.number);
  });
  kernels.begin(call, 1);
  for (uint32_t i = 0; i < commands;) {
    if (kernels.has_room()) {
      const uint64_t queue = random() % 5;
      kernels.add(queue, command(base + i++ * 8 + queue));
    }
    if (random() % 3 == 0) kernels.submit();
  }
  kernels.end();
  caller.join();
}

}  // namespace

// A kernel that seals may still be queued when the last reference to its key is dropped.
// threat: V5
TEST(keys_are_overwritten_behind_the_kernels_that_use_them) {
  Stream stream;
  std::atomic<bool> go{false};
  KeyBytes key, seen{};
  key.fill(0x5a);
  given_back = key;
  auto keys = std::make_unique<KeyMemory>(driver(), 0, 1);
  keys->add(key, {});
  stream.put([&, at = keys->start()] {
    while (!go) std::this_thread::yield();
    std::memcpy(seen.data(), reinterpret_cast<const void*>(at), seen.size());
  });
  keys->use_until(&stream);
  std::thread last([&] { keys.reset(); });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  go = true;
  last.join();
  stream.synchronize();
  CHECK(seen == key);
  CHECK(given_back == KeyBytes{});
}

// threat: C17
TEST(no_kernel_is_launched_on_a_stream_that_is_captured) {
  Stream stream;
  stream.captured = true;
  const gpu::BatchArgument argument{};
  bool refused = false;
  try {
    gpu::launch(driver(), 1, 1, gpu::kThreads, 1, &argument, &stream);
  } catch (const std::runtime_error& error) {
    refused = std::strstr(error.what(), "cannot be part of a CUDA graph") != nullptr;
  }
  CHECK(refused);
  CHECK(stream.idle());
}

TEST(every_command_is_run_once_and_queues_keep_their_order) {
  std::mt19937 random(1);
  commands_run.clear();
  uint64_t expected = 0;
  {
    Stream user;
    Kernels kernels;
    for (int call = 0; call < 60; ++call) {
      const uint32_t commands = random() % (call % 10 == 0 ? 900 : 40);
      run_collective(kernels, user, commands, 1 + random() % 3, expected * 8, random);
      expected += commands;
    }
  }
  CHECK(commands_run.size() == expected);
  std::vector<bool> seen(expected, false);
  std::map<uint64_t, uint64_t> last;  // by queue
  for (const uint64_t argument : commands_run) {
    const uint64_t which = argument / 8, queue = argument % 8;
    CHECK(which < expected && !seen[which]);
    seen[which] = true;
    CHECK(last[queue] <= which);
    last[queue] = which;
  }
}

TEST(a_stream_waits_until_its_call_has_ended_and_no_longer) {
  Stream user, other;
  Kernels kernels;
  const Submitted call = kernels.launch(kShape, 3, 0, handle(user));
  kernels.launch_rest();
  kernels.mark_end(call.number);
  kernels.wait_on_stream(handle(other), call.number);
  std::atomic<bool> went_on = false;
  other.put([&] { went_on = true; });
  commands_run.clear();
  kernels.begin(call, 1);
  const uint64_t argument = kernels.add(0, command(7));
  kernels.submit();
  while (!kernels.batch_done(argument)) std::this_thread::yield();
  CHECK(commands_run == std::vector<uint64_t>{7});
  CHECK(!went_on && !kernels.done(call.number));
  kernels.end();
  other.synchronize();
  CHECK(went_on && kernels.done(call.number));
}

TEST(a_call_waits_for_its_callers_stream_and_for_no_other) {
  Stream slow, quick;
  std::atomic<bool> may_go = false;
  slow.put([&] {
    while (!may_go) std::this_thread::yield();
  });
  Kernels kernels;
  commands_run.clear();
  const Submitted call = kernels.launch(kShape, 1, 0, handle(slow));
  kernels.begin(call, 1);
  const uint64_t argument = kernels.add(0, command(1));
  kernels.submit();
  quick.synchronize();
  CHECK(!kernels.batch_done(argument));
  may_go = true;
  kernels.end();
  CHECK(kernels.batch_done(argument));
  run_collective(kernels, quick, 1, 0, 80, *std::make_unique<std::mt19937>(2));
  CHECK(commands_run.size() == 2);
}

TEST(what_was_not_handed_over_is_forgotten_and_what_was_is_done) {
  Stream user;
  Kernels kernels;
  commands_run.clear();
  const Submitted call = kernels.launch(kShape, 3, 1, handle(user));
  kernels.begin(call, 1);
  kernels.add(0, command(1));
  kernels.add(0, command(2));  // submits the first
  kernels.abandon();
  CHECK(commands_run == std::vector<uint64_t>{1});
  kernels.add(0, command(3));  // stands for the command that poisons the result
  kernels.end();
  CHECK(commands_run == (std::vector<uint64_t>{1, 3}));
}

TEST(more_batches_than_kernels_is_an_error) {
  Stream user;
  Kernels kernels;
  const Submitted call = kernels.launch(kShape, 1, 1, handle(user));
  kernels.begin(call, 1);
  commands_run.clear();
  kernels.add(0, command(1));
  kernels.add(0, command(2));
  CHECK_THROWS(std::logic_error, kernels.add(0, command(3)));
  kernels.abandon();
  std::array<uint8_t, 3> memory{};
  const std::array results{std::span<uint8_t>(memory)};
  kernels.fail(call, results);  // overwrites the result and the keys, with one of the spare kernels
  CHECK(commands_run == (std::vector<uint64_t>{1, 0xff, 0}));
  CHECK(!kernels.busy());
  kernels.fail(call, results);  // has no effect a second time
  CHECK(commands_run.size() == 3);
}

TEST(a_group_that_is_gone_lets_streams_go_on_and_the_next_counts_on) {
  Stream user, held;
  uint32_t before = 0;
  {
    Kernels kernels;
    before = kernels.launch(kShape, 2, 0, handle(user)).number;  // never run
    kernels.mark_end(before);
    kernels.wait_on_stream(handle(held), before);
  }
  held.synchronize();
  Kernels next;
  const Submitted call = next.launch(kShape, 1, 0, handle(user));
  CHECK(call.number == before + 1);
  next.begin(call, 1);
  next.end();
}

int main(int argc, char** argv) { return testing::run(argc, argv); }
