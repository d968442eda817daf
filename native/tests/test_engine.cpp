// Whole engines, one thread for each rank: results, and what other threads may do meanwhile. For
// ThreadSanitizer too, which cannot see this from Python.

#include <atomic>
#include <chrono>
#include <climits>
#include <functional>
#include <optional>
#include <string>
#include <thread>

#include "check.hpp"
#include "collective/engine.hpp"
#include "engines.hpp"
#include "programs.hpp"

using namespace sealring;
using namespace sealring::testing;

TEST(ring_all_reduce_sums) {
  over_both([](Transport transport) {
    for (int size : {1, 2, 3, 5}) {
      World world(size, transport);
      const auto failures = world.run([&](int rank, Engine& engine) {
        const Program program = ring_all_reduce(size, rank);
        for (uint64_t number = 1; number <= 10; ++number) {
          std::vector<float> tensor(static_cast<size_t>(size) * 700, static_cast<float>(rank + 1));
          all_reduce(engine, program, tensor, number);
          const float want = static_cast<float>(size * (size + 1) / 2);
          for (float value : tensor) CHECK(value == want);
        }
      });
      CHECK(none(failures));
    }
  });
}

TEST(direct_broadcast_arrives) {
  over_both([](Transport transport) {
    World world(4, transport);
    const auto failures = world.run([&](int rank, Engine& engine) {
      const Program program = direct_broadcast(4, rank);
      for (uint64_t number = 1; number <= 20; ++number) {
        std::vector<float> tensor(5000, rank == 0 ? static_cast<float>(number) : 0.0f);
        const Call call{&program,
                        cut(tensor, 1),
                        number,
                        tensor.size() * 4,
                        0,
                        DType::float32,
                        ReduceKind::none,
                        1.0,
                        1024,
                        20};
        engine.run(call);
        for (float value : tensor) CHECK(value == static_cast<float>(number));
      }
    });
    CHECK(none(failures));
  });
}

// The receiver opens segments in order. If a later segment got ahead because room came just then, it could
// wait at the head of the link for ever for the segments behind it.
TEST(records_of_a_link_leave_in_the_order_of_their_segments) {
  constexpr size_t kSegment = 1024, kFit = kRing / (kRecordOverhead + kSegment), kRest = 100;
  static_assert(kRing % (kRecordOverhead + kSegment) >= kRecordOverhead + kRest);
  SharedMemory memory;
  const auto [near, far] = tcp_pair();
  Engine engine(0, 2, Context{}, group_key(0), kSegment, 50'000);
  engine.add_link(1, memory.pipe(near, 0), pair_key(0, 1), pair_key(1, 0), group_key(1));
  End receiver(1, memory.pipe(far, 1), 50'000);
  const Program program(4, 2, 0, 2, 1, {}, {{Action::send, 0, {1}, 0, -1, -1, {}}});
  std::vector<uint8_t> tensor((kFit + 1) * kSegment + kRest);
  std::thread sender([&] {
    engine.run({&program,
                {{tensor.data(), tensor.size()}},
                1,
                tensor.size(),
                0,
                DType::uint8,
                ReduceKind::none,
                1.0,
                kSegment,
                20});
  });
  while (!memory.waits_for_room(0)) std::this_thread::yield();
  for (size_t segment = 0; segment <= kFit + 1; ++segment) {
    receiver.receive();
    CHECK(receiver.link.header().segment == segment);
    receiver.open();
  }
  sender.join();
}

TEST(account_may_be_asked_for_at_any_time) {
  over_both([](Transport transport) {
    World world(3, transport);
    std::atomic<bool> done{false};
    std::thread asker([&] {
      while (!done) {
        for (const auto& engine : world.engines) {
          const Engine::Account account = engine->account();
          if (account.waited_s.size() != 3) std::abort();
        }
        std::this_thread::yield();
      }
    });
    const auto failures = world.run([&](int rank, Engine& engine) {
      const Program program = ring_all_reduce(3, rank);
      for (uint64_t number = 1; number <= 30; ++number) {
        std::vector<float> tensor(900, 1.0f);
        all_reduce(engine, program, tensor, number);
      }
    });
    done = true;
    asker.join();
    CHECK(none(failures));
    for (const auto& engine : world.engines) CHECK(engine->account().stats.sealed_records >= 90);
  });
}

// The interrupted rank sends an alert, and the others report it.
TEST(interrupt_from_another_thread_ends_every_rank) {
  over_both([](Transport transport) {
    World world(3, transport);
    std::thread interrupter([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(30));
      world.engines[1]->interrupt();
    });
    const auto failures = world.run([&](int rank, Engine& engine) {
      if (rank == 0) return;  // never comes, so that the others wait
      const Program program = ring_all_reduce(3, rank);
      std::vector<float> tensor(900, 1.0f);
      all_reduce(engine, program, tensor, 1);
    });
    interrupter.join();
    for (int rank : {1, 2}) {
      CHECK(failures[rank].has_value());
      if (!failures[rank]) continue;
      CHECK(failures[rank]->code == FailureCode::closed);
      CHECK(failures[rank]->reported_by == (rank == 1 ? -1 : 1));
    }
  });
}

// No other process tells the rank that its lease ended: it finds out by itself, before a collective and within one.
// threat: B21
TEST(ended_lease_ends_every_rank) {
  constexpr int64_t kNever = INT64_MAX;
  const auto now = [](clockid_t clock) {
    timespec time{};
    ::clock_gettime(clock, &time);
    return static_cast<int64_t>(time.tv_sec) * 1'000'000'000 + time.tv_nsec;
  };
  for (const bool by_wall_clock : {false, true}) {
    for (const int64_t left_ms : {-1, 30}) {
      World world(3, Transport::tcp);
      const auto lease = std::make_shared<Lease>();
      const int64_t ends =
          now(by_wall_clock ? CLOCK_REALTIME : CLOCK_BOOTTIME) + left_ms * 1'000'000;
      lease->extend(by_wall_clock ? kNever : ends, by_wall_clock ? ends : kNever);
      world.engines[1]->use_lease(lease);
      const auto failures = world.run([&](int rank, Engine& engine) {
        if (rank == 0 && left_ms > 0) return;  // never comes, so that the others wait
        const Program program = ring_all_reduce(3, rank);
        std::vector<float> tensor(900, 1.0f);
        all_reduce(engine, program, tensor, 1);
      });
      for (int rank : {1, 2}) {
        CHECK(failures[rank].has_value());
        if (!failures[rank]) continue;
        CHECK(failures[rank]->code == FailureCode::no_longer_admitted);
        CHECK(failures[rank]->peer == 1);
        CHECK(failures[rank]->reported_by == (rank == 1 ? -1 : 1));
      }
    }
  }
}

// A rank that always moves records never sleeps, but still sees the end of its lease.
// threat: B21
TEST(ended_lease_ends_a_collective_that_moves) {
  World world(2, Transport::shm);
  const auto lease = std::make_shared<Lease>();
  world.engines[0]->use_lease(lease);
  std::atomic<uint64_t> done{0};
  std::thread ender([&] {
    while (done < 3) std::this_thread::yield();
    lease->extend(0, 0);
  });
  const auto failures = world.run([&](int rank, Engine& engine) {
    const Program program = ring_all_reduce(2, rank);
    for (uint64_t number = 1;; ++number) {
      std::vector<float> tensor(600, 1.0f);
      all_reduce(engine, program, tensor, number);
      if (rank == 0) done = number;
    }
  });
  ender.join();
  for (const auto& failure : failures) {
    CHECK(failure.has_value());
    if (failure) CHECK(failure->code == FailureCode::no_longer_admitted);
  }
}

// close() is called while another thread runs a collective: first the run ends, then the engine.
TEST(close_from_another_thread_ends_the_run) {
  over_both([](Transport transport) {
    for (int wait_ms : {0, 1, 5, 20}) {
      World world(2, transport);
      std::thread closer([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(wait_ms));
        world.engines[0]->close();
      });
      const auto failures = world.run([&](int rank, Engine& engine) {
        const Program program = ring_all_reduce(2, rank);
        for (uint64_t number = 1;; ++number) {
          std::vector<float> tensor(600, 1.0f);
          all_reduce(engine, program, tensor, number);
          for (float value : tensor) CHECK(value == 2.0f);
        }
      });
      closer.join();
      for (const auto& failure : failures) {
        CHECK(failure.has_value());
        if (!failure) continue;
        const bool right =
            failure->code == FailureCode::closed || failure->code == FailureCode::peer_lost;
        CHECK_NOTE(right, "%s", failure->what());
      }
    }
  });
}

TEST(closing_twice_and_side_by_side_is_harmless) {
  over_both([](Transport transport) {
    World world(3, transport);
    std::vector<std::thread> closers;
    for (int i = 0; i < 6; ++i) closers.emplace_back([&, i] { world.engines[i % 3]->close(); });
    for (std::thread& closer : closers) closer.join();
    const auto failures = world.run([&](int rank, Engine& engine) {
      const Program program = ring_all_reduce(3, rank);
      std::vector<float> tensor(3, 1.0f);
      all_reduce(engine, program, tensor, 1);
    });
    for (const auto& failure : failures) CHECK(failure && failure->code == FailureCode::closed);
  });
}

// threat: F12
TEST(failed_engine_repeats_its_failure) {
  World world(2, Transport::tcp);
  world.engines[1]->close();
  const Program program = ring_all_reduce(2, 0);
  std::vector<float> tensor(2, 1.0f);
  for (int i = 0; i < 3; ++i) {
    try {
      all_reduce(*world.engines[0], program, tensor, 1);
      CHECK(false && "did not fail");
    } catch (const Failure& failure) {
      CHECK(failure.code == FailureCode::peer_lost);
      CHECK(failure.peer == 1);
      CHECK(std::string(failure.what())
                .starts_with("Connection closed by peer: the peer left the group"));
    }
  }
}

TEST(silent_peer_is_named) {
  over_both([](Transport transport) {
    World world(2, transport);
    const Program program = ring_all_reduce(2, 0);
    std::vector<float> tensor(2, 1.0f);
    try {
      all_reduce(*world.engines[0], program, tensor, 1, 0.1);
      CHECK(false && "did not fail");
    } catch (const Failure& failure) {
      CHECK(failure.code == FailureCode::peer_silent);
      CHECK(failure.peer == 1);
    }
  });
}

TEST(calls_that_do_not_fit_are_refused) {
  World world(2, Transport::tcp);
  Engine& engine = *world.engines[0];
  const Program right = ring_all_reduce(2, 0), other_rank = ring_all_reduce(2, 1),
                other_world = ring_all_reduce(3, 0);
  std::vector<float> tensor(6, 1.0f);
  const auto call = [&](const Program& program, int slots, size_t segment, ReduceKind kind) {
    engine.run({&program, cut(tensor, slots), 1, 24, 0, DType::float32, kind, 1.0, segment, 1});
  };
  CHECK_THROWS(std::invalid_argument, call(other_rank, 2, 1024, ReduceKind::sum));
  CHECK_THROWS(std::invalid_argument, call(other_world, 3, 1024, ReduceKind::sum));
  CHECK_THROWS(std::invalid_argument, call(right, 1, 1024, ReduceKind::sum));
  CHECK_THROWS(std::invalid_argument, call(right, 2, 0, ReduceKind::sum));
  CHECK_THROWS(std::invalid_argument, call(right, 2, 24, ReduceKind::sum));
  CHECK_THROWS(std::invalid_argument, call(right, 2, 1u << 20, ReduceKind::sum));
  CHECK_THROWS(std::invalid_argument, call(right, 2, 1024, ReduceKind::none));
}

TEST(programs_that_make_no_sense_are_refused) {
  const auto make = [](std::vector<Step> steps) {
    return Program(1, 1, 0, 2, 1, {}, std::move(steps));
  };
  make({});
  CHECK_THROWS(std::invalid_argument, make({{Action::send, 1, {1}, 0, -1, -1, {}}}));
  CHECK_THROWS(std::invalid_argument, make({{Action::send, -1, {1}, 0, -1, -1, {}}}));
  CHECK_THROWS(std::invalid_argument, make({{Action::send, 0, {0}, 0, -1, -1, {}}}));
  CHECK_THROWS(std::invalid_argument, make({{Action::send, 0, {2}, 0, -1, -1, {}}}));
  CHECK_THROWS(std::invalid_argument, make({{Action::send, 0, {}, 0, -1, -1, {}}}));
  CHECK_THROWS(std::invalid_argument, make({{Action::publish, 0, {}, 0, -1, -1, {}}}));
  CHECK_THROWS(std::invalid_argument, make({{Action::receive, 0, {1}, 0, 2, -1, {}}}));
  CHECK_THROWS(std::invalid_argument, make({{Action::forward, 0, {1}, 0, -1, 0, {}}}));
  CHECK_THROWS(std::invalid_argument, make({{Action::copy, 0, {}, 0, -1, 1, {}}}));
  CHECK_THROWS(std::invalid_argument, make({{Action::copy, 0, {}, 0, -1, 0, {0}}}));
  CHECK_THROWS(std::invalid_argument, make({{static_cast<Action>(9), 0, {}, 0, -1, -1, {}}}));
  CHECK_THROWS(std::invalid_argument, Program(1, 1, 2, 2, 1, {}, {}));
  CHECK_THROWS(std::invalid_argument, Program(1, 1, 0, 2, 0, {}, {}));
  CHECK_THROWS(std::invalid_argument, Program(1, 1, 0, 2, 1, {1}, {}));
}

int main(int argc, char** argv) { return run(argc, argv); }
