// Messages that streams wait for, on a GPU whose driver is played by this CPU: streams are threads.
#include "device/cuda/persistent_kernel.hpp"

#include <algorithm>
#include <atomic>
#include <random>
#include <thread>

#include "check.hpp"
#include "device/cuda/cuda_device.hpp"
#include "post.hpp"
#include "stand_ins/host_driver.hpp"

using namespace sealring;
using namespace sealring::testing;

namespace {

std::unique_ptr<Device> gpu() {
  auto device = std::make_unique<CudaDevice>(host_driver(), 0, 2, host_function(HostKernel::seal),
                                             host_function(HostKernel::open));
  device->enable_persistent_kernel(host_function(HostKernel::run_all_batches));
  return device;
}

uint64_t handle(HostStream& stream) { return reinterpret_cast<uint64_t>(&stream); }

CallerStream behind(HostStream& stream) { return {0, handle(stream), true}; }

// Stops a stream at this point until it is opened.
struct Barrier {
  void put_into(HostStream& stream) {
    stream.put([this] {
      while (!open) std::this_thread::yield();
    });
  }
  std::atomic<bool> open = false;
};

// Two ranks, each with a GPU, a stream of the script and a thread that moves messages for which no thread
// waits.
struct Streamed {
  explicit Streamed(SharedMemory* memory, uint64_t rekey_bytes = 1u << 30)
      : post(memory, 4096, rekey_bytes) {
    for (Mailbox* box : {&post.zero, &post.one}) {
      box->attach(gpu());
      movers.emplace_back([box] {
        try {
          while (!box->finished().empty()) {
          }
        } catch (const Failure&) {
        }
      });
    }
  }
  ~Streamed() { end(); }
  void end() {
    post.zero.close();
    post.one.close();
    for (std::thread& mover : movers) mover.join();
    movers.clear();
    CHECK(post.zero.release_device());
    CHECK(post.one.release_device());
  }
  Post post;
  std::vector<std::thread> movers;
  HostStream stream_of_zero, stream_of_one;
};

template <typename Test>
void over_both_streamed(Test test) {
  {
    Streamed tcp(nullptr);
    test(tcp);
  }
  SharedMemory memory;
  Streamed shm(&memory);
  test(shm);
}

void wait_until(const std::function<bool()>& so) {
  while (!so()) std::this_thread::yield();
}

}  // namespace

// Later work of a stream finds the received message, and a sent message contains what earlier work wrote.
TEST(streams_wait_and_the_host_goes_on) {
  over_both_streamed([](Streamed& two) {
    std::mt19937 random(3);
    std::vector<std::vector<uint8_t>> sent, got, seen;
    constexpr size_t kMessages = 60;
    sent.resize(kMessages), got.resize(kMessages), seen.resize(kMessages);
    for (size_t i = 0; i < kMessages; ++i) {
      const size_t size = i % 7 == 0 ? i / 7 : random() % 700'000;
      sent[i].resize(size), got[i].resize(size, 0xee);
      const uint32_t tag = static_cast<uint32_t>(i % 3);
      two.stream_of_zero.put([&, i, size] {
        std::ranges::copy(bytes_of(size, static_cast<uint8_t>(i)), sent[i].begin());
      });
      send(two.post.zero, 1, tag, sent[i].data(), size, 20, behind(two.stream_of_zero));
      const CompletionRef message =
          receive(two.post.one, 0, tag, got[i].data(), size, 20, behind(two.stream_of_one));
      message->wait_on_stream(handle(two.stream_of_one));
      two.stream_of_one.put([&, i] { seen[i] = got[i]; });
    }
    two.stream_of_one.synchronize();
    for (size_t i = 0; i < kMessages; ++i)
      CHECK(seen[i] == bytes_of(got[i].size(), static_cast<uint8_t>(i)));
  });
}

// A message that does not come holds up no other message, nor another stream, whatever was called first.
TEST(messages_wait_for_no_other) {
  over_both_streamed([](Streamed& two) {
    const std::vector<uint8_t> sent = bytes_of(300'000, 1);
    std::vector<uint8_t> first(300'000, 0xee), second(300'000, 0xee);
    HostStream other;
    const CompletionRef never =
        receive(two.post.one, 0, 8, first.data(), first.size(), 20, behind(other));
    never->wait_on_stream(handle(other));
    const CompletionRef message =
        receive(two.post.one, 0, 9, second.data(), second.size(), 20, behind(two.stream_of_one));
    message->wait_on_stream(handle(two.stream_of_one));
    Barrier barrier;
    barrier.put_into(two.stream_of_zero);
    HostStream free;
    const CompletionRef late =
        send(two.post.zero, 1, 8, sent.data(), sent.size(), 20, behind(two.stream_of_zero));
    send(two.post.zero, 1, 9, sent.data(), sent.size(), 20, behind(free));
    two.stream_of_one.synchronize();
    CHECK(second == sent);
    CHECK(first == std::vector<uint8_t>(300'000, 0xee));
    CHECK(late->streams_wait());
    barrier.open = true;
    other.synchronize();
    CHECK(first == sent);
  });
}

// The kernel ends when there is nothing to do, and is launched again later.
TEST(the_kernel_runs_while_there_are_messages) {
  over_both_streamed([](Streamed& two) {
    CHECK(!two.post.one.persistent_kernel_runs());
    for (int turn = 0; turn < 20; ++turn) {
      const std::vector<uint8_t> sent = bytes_of(5000, 1);
      std::vector<uint8_t> got(5000);
      const CompletionRef message =
          receive(two.post.one, 0, 1, got.data(), got.size(), 20, behind(two.stream_of_one));
      CHECK(two.post.one.persistent_kernel_runs());
      message->wait_on_stream(handle(two.stream_of_one));
      send(two.post.zero, 1, 1, sent.data(), sent.size(), 20, behind(two.stream_of_zero));
      two.stream_of_one.synchronize();
      CHECK(got == sent);
      wait_until([&] {
        return !two.post.one.persistent_kernel_runs() && !two.post.zero.persistent_kernel_runs();
      });
    }
  });
}

// While kernels are launched one by one for a message whose host waits, streams cannot wait for other
// messages, and the callers are told so.
TEST(beside_launched_messages_there_is_no_persistent_kernel) {
  over_both_streamed([](Streamed& two) {
    const std::vector<uint8_t> sent = bytes_of(5000, 1);
    std::vector<uint8_t> one(5000), other(5000);
    const CompletionRef launched =
        receive(two.post.one, 0, 1, one.data(), one.size(), 20, CallerStream{});
    const CompletionRef beside = receive(two.post.one, 0, 2, other.data(), other.size(), 20,
                                         CallerStream{0, handle(two.stream_of_one), true});
    CHECK(!beside->streams_wait());
    send(two.post.zero, 1, 2, sent.data(), sent.size(), 20, behind(two.stream_of_zero));
    send(two.post.zero, 1, 1, sent.data(), sent.size(), 20, behind(two.stream_of_zero));
    wait_for(launched);
    wait_for(beside);
    CHECK(one == sent);
    CHECK(other == sent);
    // While the persistent kernel runs, it runs all messages, also one whose host waits.
    const CompletionRef held =
        receive(two.post.one, 0, 3, one.data(), one.size(), 20, behind(two.stream_of_one));
    const CompletionRef waited = receive(two.post.one, 0, 4, other.data(), other.size(), 20,
                                         CallerStream{0, handle(two.stream_of_one), false});
    CHECK(held->streams_wait());
    CHECK(waited->streams_wait());
    const std::vector<uint8_t> again = bytes_of(5000, 9);
    send(two.post.zero, 1, 4, again.data(), again.size(), 20, behind(two.stream_of_zero));
    wait_for(waited);
    CHECK(other == again);
    send(two.post.zero, 1, 3, again.data(), again.size(), 20, behind(two.stream_of_zero));
    held->wait_on_stream(handle(two.stream_of_one));
    two.stream_of_one.synchronize();
    CHECK(one == again);
  });
}

TEST(keys_are_replaced_while_it_runs) {
  SharedMemory memory;
  Streamed two(&memory, 20'000);
  for (int turn = 0; turn < 4; ++turn) {
    std::vector<std::vector<uint8_t>> got(8, std::vector<uint8_t>(90'000));
    const std::vector<uint8_t> sent = bytes_of(90'000, static_cast<uint8_t>(turn));
    for (auto& each : got) {
      const CompletionRef message =
          receive(two.post.one, 0, 1, each.data(), each.size(), 20, behind(two.stream_of_one));
      message->wait_on_stream(handle(two.stream_of_one));
      send(two.post.zero, 1, 1, sent.data(), sent.size(), 20, behind(two.stream_of_zero));
    }
    two.stream_of_one.synchronize();
    for (const auto& each : got) CHECK(each == sent);
  }
}

// After a failure streams go on, and find bytes that cannot be taken for a message.
TEST(a_failure_lets_streams_go_on_without_a_result) {
  over_both_streamed([](Streamed& two) {
    std::vector<uint8_t> got(100'000, 0xee), untold(1000, 0xee), seen;
    const CompletionRef message =
        receive(two.post.one, 0, 1, got.data(), got.size(), 20, behind(two.stream_of_one));
    message->wait_on_stream(handle(two.stream_of_one));
    two.stream_of_one.put([&] { seen = got; });
    const std::vector<uint8_t> sent = bytes_of(1000, 1);
    send(two.post.one, 0, 2, sent.data(), sent.size(), 20, behind(two.stream_of_one));
    two.post.one.fail(Failure(FailureCode::no_longer_admitted, 0, "it was told to"));
    CHECK(seen.empty());
    two.post.one.release_streams();
    two.stream_of_one.synchronize();
    CHECK(seen == std::vector<uint8_t>(100'000, 0xff));
    wait_until([&] { return !two.post.one.persistent_kernel_runs(); });
    FailureCode refused{};
    try {
      receive(two.post.one, 0, 3, untold.data(), untold.size(), 20, behind(two.stream_of_one));
    } catch (const Failure& failure) {
      refused = failure.code;
    }
    CHECK(refused == FailureCode::no_longer_admitted);
    CHECK(untold == std::vector<uint8_t>(1000, 0xee));
  });
}

// After a failure streams go on even if no thread reports the failure to the script.
TEST(streams_go_on_by_themselves) {
  Streamed two(nullptr);
  std::vector<uint8_t> got(1000, 0xee);
  const CompletionRef message =
      receive(two.post.one, 0, 1, got.data(), got.size(), 20, behind(two.stream_of_one));
  message->wait_on_stream(handle(two.stream_of_one));
  two.post.one.fail(Failure(FailureCode::no_longer_admitted, 0, "it was told to"));
  two.stream_of_one.synchronize();
  CHECK(got == std::vector<uint8_t>(1000, 0xff));
}

// Until its stream has come to the call, earlier work may use the memory.
TEST(a_result_is_not_overwritten_before_its_stream_is_there) {
  over_both_streamed([](Streamed& two) {
    std::vector<uint8_t> got(1000, 0xee), before, after;
    Barrier barrier;
    barrier.put_into(two.stream_of_one);
    two.stream_of_one.put([&] { before = got; });
    const CompletionRef message =
        receive(two.post.one, 0, 1, got.data(), got.size(), 20, behind(two.stream_of_one));
    message->wait_on_stream(handle(two.stream_of_one));
    two.stream_of_one.put([&] { after = got; });
    two.post.one.fail(Failure(FailureCode::no_longer_admitted, 0, "it was told to"));
    CHECK(!two.post.one.release_device(std::chrono::milliseconds(30)));
    CHECK(got == std::vector<uint8_t>(1000, 0xee));
    barrier.open = true;
    two.stream_of_one.synchronize();
    CHECK(before == std::vector<uint8_t>(1000, 0xee));
    CHECK(after == std::vector<uint8_t>(1000, 0xff));
  });
}

// The memory of the numbers outlives the group, because a stream may come to a wait late.
TEST(a_stream_that_comes_late_to_a_group_that_is_gone) {
  HostStream late;
  Barrier barrier;
  std::vector<uint8_t> got(1000, 0xee);
  {
    Streamed two(nullptr);
    const CompletionRef message =
        receive(two.post.one, 0, 1, got.data(), got.size(), 20, behind(two.stream_of_one));
    barrier.put_into(late);
    message->wait_on_stream(handle(late));
    two.end();
    CHECK(message->done());
    CHECK(message->error().has_value());
    message->wait_on_stream(handle(late));  // has no effect
  }
  Streamed next(nullptr);
  const std::vector<uint8_t> sent = bytes_of(1000, 1);
  std::vector<uint8_t> more(1000);
  const CompletionRef message =
      receive(next.post.one, 0, 1, more.data(), more.size(), 20, behind(next.stream_of_one));
  barrier.open = true;
  late.synchronize();  // although a message of the next group is under way
  send(next.post.zero, 1, 1, sent.data(), sent.size(), 20, behind(next.stream_of_zero));
  message->wait_on_stream(handle(next.stream_of_one));
  next.stream_of_one.synchronize();
  CHECK(more == sent);
}

// A message that takes long does not stop others from getting numbers.
TEST(numbers_go_on_past_one_that_is_taken) {
  std::vector<uint8_t> never(1), byte(1);
  Streamed two(nullptr);
  receive(two.post.one, 0, 7, never.data(), 1, 60, behind(two.stream_of_one));
  for (uint32_t i = 0; i < CommandQueue::kNumbers + 10; ++i) {
    const CompletionRef message =
        receive(two.post.one, 0, 8, byte.data(), 1, 60, behind(two.stream_of_one));
    send(two.post.zero, 1, 8, byte.data(), 1, 60, behind(two.stream_of_zero));
    message->wait_on_stream(handle(two.stream_of_one));
    two.stream_of_one.synchronize();
  }
}

TEST(more_messages_than_have_numbers_are_refused) {
  std::vector<uint8_t> byte(1);  // written until the group has ended
  Streamed two(nullptr);
  for (uint32_t i = 0; i < CommandQueue::kNumbers; ++i) {
    receive(two.post.one, 0, i, byte.data(), 1, 60, behind(two.stream_of_one));
  }
  bool refused = false;
  try {
    receive(two.post.one, 0, 1, byte.data(), 1, 60, behind(two.stream_of_one));
  } catch (const std::runtime_error& error) {
    refused =
        std::string(error.what()).find("4096 messages of a GPU are under way") != std::string::npos;
  }
  CHECK(refused);
}

int main(int argc, char** argv) { return run(argc, argv); }
