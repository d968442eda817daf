// PrelaunchedKernels, with a kernel that notes what it is told: every command is obeyed once, those of a queue in order, and what was launched and not needed holds up nobody.

#include <atomic>
#include <map>
#include <memory>
#include <random>
#include <stdexcept>
#include <thread>
#include <vector>

#include "stand_ins/host_driver.hpp"
#include "device/cuda/prelaunched_kernels.hpp"
#include "check.hpp"

using namespace sealring;

namespace {

using Stream = HostStream;

std::vector<uint64_t> obeyed;  // the commands' arguments, in the order in which they were

std::atomic_ref<uint32_t> number_at(cuda::Pointer at) {
  return std::atomic_ref<uint32_t>(*reinterpret_cast<uint32_t*>(at));
}

// What engine/cuda/prelaunched_kernels.hpp does, but for the commands themselves.
void serve(const gpu::BatchArgument& argument) {
  const auto* const batch = reinterpret_cast<const gpu::Batch*>(argument.batch);
  if (batch->number != argument.number) return;
  for (uint32_t i = 0; i < batch->count; ++i) obeyed.push_back(batch->commands[i].argument);
  number_at(argument.done).store(argument.number, std::memory_order_release);
}

cuda::Driver noting() {
  cuda::Driver out = host_driver();
  out.launch = [](const cuda::LaunchConfig* config, cuda::Handle, void** arguments, void**) {
    const gpu::BatchArgument argument = *static_cast<const gpu::BatchArgument*>(arguments[0]);
    static_cast<Stream*>(config->stream)->put([argument] { serve(argument); });
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

// A collective of so many commands, told by this thread while another one launches the rest.
void run_collective(PrelaunchedKernels& shifts, Stream& user, uint32_t commands, uint32_t spare, uint64_t base,
                    std::mt19937& random) {
  const uint64_t first = shifts.launch(kShape, commands + spare, &user);
  std::thread caller([&] { shifts.launch_rest(); });
  shifts.begin(first, commands + spare, 0);
  for (uint32_t i = 0; i < commands;) {
    if (shifts.has_room()) {
      const uint64_t queue = random() % 5;
      shifts.add(queue, command(base + i++ * 8 + queue));
    }
    if (random() % 3 == 0) shifts.submit();
  }
  shifts.end();
  caller.join();
}

}  // namespace

TEST(every_command_is_obeyed_once_and_queues_keep_their_order) {
  std::mt19937 random(1);
  obeyed.clear();
  uint64_t expected = 0;
  {
    Stream user;
    PrelaunchedKernels shifts(driver());
    for (int call = 0; call < 60; ++call) {
      const uint32_t commands = random() % (call % 10 == 0 ? 900 : 40);
      run_collective(shifts, user, commands, 1 + random() % 3, expected * 8, random);
      expected += commands;
    }
  }
  CHECK(obeyed.size() == expected);
  std::vector<bool> seen(expected, false);
  std::map<uint64_t, uint64_t> last;  // by queue
  for (const uint64_t argument : obeyed) {
    const uint64_t which = argument / 8, queue = argument % 8;
    CHECK(which < expected && !seen[which]);
    seen[which] = true;
    CHECK(last[queue] <= which);
    last[queue] = which;
  }
}

TEST(a_stream_waits_until_its_call_is_over_and_no_longer) {
  Stream user, other;
  PrelaunchedKernels shifts(driver());
  const uint64_t first = shifts.launch(kShape, 3, &user);
  shifts.launch_rest();
  const uint32_t over = shifts.mark_end();
  shifts.make_stream_wait(&other, over);
  std::atomic<bool> went_on = false;
  other.put([&] { went_on = true; });
  obeyed.clear();
  shifts.begin(first, 3, 0);
  const uint64_t argument = shifts.add(0, command(7));
  shifts.submit();
  while (!shifts.done(argument)) std::this_thread::yield();
  CHECK(obeyed == std::vector<uint64_t>{7});
  CHECK(!went_on && !shifts.is_done(over));
  shifts.end();
  other.synchronize();
  CHECK(went_on && shifts.is_done(over));
}

TEST(a_call_waits_for_its_callers_stream_and_for_no_other) {
  Stream slow, quick;
  std::atomic<bool> may_go = false;
  slow.put([&] {
    while (!may_go) std::this_thread::yield();
  });
  PrelaunchedKernels shifts(driver());
  obeyed.clear();
  const uint64_t first = shifts.launch(kShape, 1, &slow);
  shifts.begin(first, 1, 0);
  const uint64_t argument = shifts.add(0, command(1));
  shifts.submit();
  quick.synchronize();
  CHECK(!shifts.done(argument));
  may_go = true;
  shifts.end();
  CHECK(shifts.done(argument));
  run_collective(shifts, quick, 1, 0, 80, *std::make_unique<std::mt19937>(2));
  CHECK(obeyed.size() == 2);
}

TEST(what_was_not_handed_over_is_forgotten_and_what_was_is_done) {
  Stream user;
  PrelaunchedKernels shifts(driver());
  obeyed.clear();
  const uint64_t first = shifts.launch(kShape, 4, &user);
  shifts.begin(first, 3, 1);
  shifts.add(0, command(1));
  shifts.add(0, command(2));  // pushes out the first
  shifts.abandon();
  CHECK(obeyed == std::vector<uint64_t>{1});
  shifts.add(0, command(3));  // what spoils the result
  shifts.end();
  CHECK(obeyed == (std::vector<uint64_t>{1, 3}));
}

TEST(more_batches_than_shifts_is_an_error) {
  Stream user;
  PrelaunchedKernels shifts(driver());
  const uint64_t first = shifts.launch(kShape, 2, &user);
  shifts.begin(first, 1, 1);
  obeyed.clear();
  shifts.add(0, command(1));
  shifts.add(0, command(2));
  CHECK_THROWS(std::logic_error, shifts.add(0, command(3)));
  shifts.abandon();
  shifts.use_spare();  // there is always one for the end
  shifts.add(0, command(4));
  shifts.end();
  CHECK(obeyed == (std::vector<uint64_t>{1, 4}));
}

TEST(a_group_that_is_gone_lets_streams_go_on_and_the_next_counts_on) {
  Stream user, held;
  uint32_t before = 0;
  {
    PrelaunchedKernels shifts(driver());
    shifts.launch(kShape, 2, &user);  // never run
    before = shifts.mark_end();
    shifts.make_stream_wait(&held, before);
  }
  held.synchronize();
  PrelaunchedKernels next(driver());
  const uint64_t first = next.launch(kShape, 1, &user);
  CHECK(next.mark_end() == before + 1);
  next.begin(first, 1, 0);
  next.end();
}

int main(int argc, char** argv) { return testing::run(argc, argv); }
