// Two mailboxes, with a thread that waits and one that moves the other messages, over both transports.
#include "mailbox/mailbox.hpp"

#include <chrono>
#include <functional>
#include <thread>
#include <utility>

#include "check.hpp"
#include "post.hpp"

using namespace sealring;
using namespace sealring::testing;

TEST(messages_of_every_length_arrive) {
  over_both([](Post& post) {
    for (size_t size :
         {size_t{0}, size_t{1}, size_t{32} << 10, (size_t{32} << 10) + 1, size_t{1} << 20}) {
      const std::vector<uint8_t> sent = bytes_of(size, 3);
      std::vector<uint8_t> got(size);
      std::thread sender([&] { wait_for(send(post.zero, 1, 9, sent.data(), size, 10)); });
      const auto source = wait_for(receive(post.one, Message::kAnyone, 9, got.data(), size, 10));
      sender.join();
      CHECK(source == 0);
      CHECK(got == sent);
    }
  });
}

// A message without a waiting thread is moved by the thread that calls finished().
TEST(messages_move_while_no_thread_waits) {
  over_both([](Post& post) {
    const size_t size = 300'000;
    const std::vector<uint8_t> sent = bytes_of(size, 5);
    std::vector<std::vector<uint8_t>> got(4, std::vector<uint8_t>(size));
    std::thread mover([&] {
      size_t done = 0;
      while (done < 4) done += post.zero.finished().size();
    });
    for (uint32_t tag = 0; tag < 4; ++tag) send(post.zero, 1, tag, sent.data(), size, 20);
    for (uint32_t tag : {3u, 1u, 2u, 0u}) {
      wait_for(receive(post.one, 0, tag, got[tag].data(), size, 20));
      CHECK(got[tag] == sent);
    }
    mover.join();
  });
}

// Several threads wait at once: one moves the messages, the others are woken.
TEST(many_may_wait) {
  over_both([](Post& post) {
    std::vector<std::vector<uint8_t>> got(8, std::vector<uint8_t>(50'000));
    std::vector<std::thread> threads;
    for (uint32_t tag = 0; tag < 8; ++tag) {
      threads.emplace_back(
          [&, tag] { wait_for(receive(post.one, 0, tag, got[tag].data(), got[tag].size(), 20)); });
      threads.emplace_back([&, tag] {
        const std::vector<uint8_t> sent = bytes_of(50'000, static_cast<uint8_t>(tag));
        wait_for(send(post.zero, 1, tag, sent.data(), sent.size(), 20));
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (uint32_t tag = 0; tag < 8; ++tag)
      CHECK(got[tag] == bytes_of(50'000, static_cast<uint8_t>(tag)));
  });
}

TEST(closing_under_a_waiter_ends_it) {
  over_both([](Post& post) {
    uint8_t byte = 0;
    std::thread waiter([&] {
      bool closed = false;
      try {
        wait_for(receive(post.one, 0, 0, &byte, 1, 20));
      } catch (const Failure& failure) {
        closed = failure.code == FailureCode::closed;
      }
      CHECK(closed);
    });
    std::thread mover([&] { CHECK(post.one.finished().empty()); });
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    post.one.close();
    waiter.join();
    mover.join();
  });
}

// Ends a thread that waits and a call that comes later; the peer is told why.
// threat: B21
TEST(ended_lease_ends_messages_at_both_ends) {
  over_both([](Post& post) {
    const auto lease = std::make_shared<Lease>();
    post.one.use_lease(lease);
    uint8_t byte = 0;
    const auto outcome = [](const std::function<void()>& call) {
      try {
        call();
      } catch (const Failure& failure) {
        return std::make_pair(failure.code, failure.peer);
      }
      return std::make_pair(FailureCode{}, -1);
    };
    const auto refused = std::make_pair(FailureCode::no_longer_admitted, 1);
    std::thread waiter([&] {
      CHECK(outcome([&] { wait_for(receive(post.one, 0, 0, &byte, 1, 20)); }) == refused);
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    lease->extend(0, 0);
    waiter.join();
    CHECK(outcome([&] { send(post.one, 0, 0, &byte, 1, 20); }) == refused);
    CHECK(outcome([&] { wait_for(receive(post.zero, 1, 0, &byte, 1, 20)); }) == refused);
  });
}

// The lease ends while no call waits: the next call is refused.
TEST(ended_lease_refuses_the_next_message) {
  over_both([](Post& post) {
    const auto lease = std::make_shared<Lease>();
    lease->extend(0, 0);
    post.one.use_lease(lease);
    uint8_t byte = 0;
    FailureCode seen{};
    try {
      send(post.one, 0, 0, &byte, 1, 20);
    } catch (const Failure& failure) {
      seen = failure.code;
    }
    CHECK(seen == FailureCode::no_longer_admitted);
  });
}

// A receive from any rank fails when every rank that could send has left.
// threat: M9
TEST(receive_from_anyone_ends_when_all_have_left) {
  over_both([](Post& post) {
    uint8_t byte = 0;
    const CompletionRef ticket = receive(post.one, Message::kAnyone, 0, &byte, 1, 20);
    std::thread leaver([&] { post.zero.close(); });
    FailureCode seen{};
    try {
      wait_for(ticket);
    } catch (const Failure& failure) {
      seen = failure.code;
    }
    leaver.join();
    CHECK(seen == FailureCode::peer_lost);
  });
}

TEST(another_size_is_out_of_step_at_both_ends) {
  over_both([](Post& post) {
    std::vector<uint8_t> sent(10);
    std::vector<uint8_t> got(11);
    send(post.zero, 1, 0, sent.data(), sent.size(), 20);
    FailureCode seen{};
    try {
      wait_for(receive(post.one, 0, 0, got.data(), got.size(), 20));
    } catch (const Failure& failure) {
      seen = failure.code;
    }
    CHECK(seen == FailureCode::out_of_step);
    int reporter = -1;
    try {
      wait_for(receive(post.zero, 1, 0, got.data(), got.size(), 20));
    } catch (const Failure& failure) {
      reporter = failure.reported_by;
    }
    CHECK(reporter == 1);
  });
}

// One byte is changed on the way, at any place: the receiver fails and its memory is not written.
// threat: M2
TEST(changed_message_is_not_delivered) {
  const size_t size = 100;
  for (size_t at = 0; at < kRecordOverhead + size; at += 7) {
    SharedMemory memory;
    Post post(&memory);
    const std::vector<uint8_t> sent = bytes_of(size, 1);
    std::vector<uint8_t> got(size, 0xee);
    send(post.zero, 1, 0, sent.data(), size, 20);
    memory.data(0)[at] ^= 1;
    FailureCode seen{};
    try {
      wait_for(receive(post.one, 0, 0, got.data(), size, 20));
    } catch (const Failure& failure) {
      seen = failure.code;
    }
    CHECK(seen == FailureCode::tampered);
    CHECK(got == std::vector<uint8_t>(size, 0xee));
  }
}

// ---- tensors that a device holds ---------------------------------------------------------------

// Many threads wait for messages of a device and of the CPU. Each of them may be the one that moves the
// messages and uses the device.
TEST(devices_messages_arrive_on_each_driving_thread) {
  over_both([](Post& post) {
    post.attach(7, 5);
    const size_t size = 600'001;
    std::vector<std::vector<uint8_t>> got(8, std::vector<uint8_t>(size));
    std::vector<std::thread> threads;
    for (uint32_t tag = 0; tag < 8; ++tag) {
      // Some streams come to the call late.
      const std::optional<CallerStream> ready =
          tag % 4 == 3 ? std::nullopt : std::optional(CallerStream{.ready = tag * 10});
      threads.emplace_back([&, tag, ready] {
        wait_for(receive(post.one, 0, tag, got[tag].data(), size, 20, ready));
      });
      threads.emplace_back([&, tag, ready] {
        const std::vector<uint8_t> sent = bytes_of(size, static_cast<uint8_t>(tag));
        wait_for(send(post.zero, 1, tag, sent.data(), size, 20, ready));
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (uint32_t tag = 0; tag < 8; ++tag)
      CHECK(got[tag] == bytes_of(size, static_cast<uint8_t>(tag)));
  });
}

// One byte of the record is changed in shared memory, at any place: nothing of the record is written.
// threat: C3
TEST(devices_changed_message_is_not_delivered) {
  const size_t size = 100;
  for (size_t at = 0; at < kRecordOverhead + size; at += 7) {
    SharedMemory memory;
    Post post(&memory);
    post.attach(3, 3);
    const std::vector<uint8_t> sent = bytes_of(size, 1);
    std::vector<uint8_t> got(size, 0xee);
    uint8_t bell = 0;
    const CompletionRef incoming = receive(post.one, 0, 0, got.data(), size, 20, CallerStream{});
    const CompletionRef outgoing = send(post.zero, 1, 0, sent.data(), size, 20, CallerStream{});
    // When this second message has come, the first one was accepted.
    send(post.zero, 1, 1, &bell, 1, 20);
    wait_for(receive(post.one, 0, 1, &bell, 1, 20));
    wait_for(outgoing);
    memory.data(0)[2 * kRecordOverhead + 1 + at] ^= 1;
    FailureCode seen{};
    try {
      wait_for(incoming);
    } catch (const Failure& failure) {
      seen = failure.code;
    }
    CHECK(seen == FailureCode::tampered);
    CHECK(got == std::vector<uint8_t>(size, 0xee));
  }
}

// When the caller gets the failure it may use the memory again: the device no longer writes to it.
TEST(a_failure_takes_the_memory_from_the_device_first) {
  over_both([](Post& post) {
    post.attach(1, 1 << 30);
    const std::vector<uint8_t> sent = bytes_of(4u << 20, 1);
    std::vector<uint8_t> got(sent.size());
    const CompletionRef incoming =
        receive(post.one, 0, 0, got.data(), got.size(), 20, CallerStream{});
    std::thread waiter([&] {
      FailureCode seen{};
      try {
        wait_for(incoming);
      } catch (const Failure& failure) {
        seen = failure.code;
      }
      CHECK(seen == FailureCode::no_longer_admitted);
    });
    std::thread mover([&] {
      try {
        post.zero.finished();
      } catch (const Failure&) {
      }
    });
    send(post.zero, 1, 0, sent.data(), sent.size(), 20, CallerStream{});
    // The device takes as many records as it has room for, and settles none.
    while (post.one.stats().opened_bytes < 8 * kGpuPayload) std::this_thread::yield();
    post.one.fail(Failure(FailureCode::no_longer_admitted, 0, "it was told to"));
    waiter.join();
    CHECK(post.one.device()->has_room());
    mover.join();
  });
}

int main(int argc, char** argv) { return run(argc, argv); }
