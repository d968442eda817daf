// Collectives divided among several lanes: results, keys, failures, ends.

#include <sys/socket.h>

#include <chrono>
#include <new>
#include <numeric>
#include <optional>
#include <set>
#include <string>
#include <thread>

#include "check.hpp"
#include "engines.hpp"
#include "programs.hpp"

using namespace sealring;
using namespace sealring::testing;

namespace {

constexpr size_t kSegment = 1024;

struct LanedWorld : World {
  LanedWorld(int size, Transport transport, size_t lanes) : World(size, transport), lanes(lanes) {
    for (size_t lane = 1; lane < lanes; ++lane) add_lane(lane, transport);
  }
  const size_t lanes;
};

Call call_of(const Program& program, std::vector<Slot> slots, size_t lane, size_t lanes) {
  return {.program = &program,
          .slots = std::move(slots),
          .total = std::nullopt,
          .root = 0,
          .dtype = DType::uint8,
          .reduction = ReduceKind::none,
          .factor = 1.0,
          .segment_bytes = kSegment,
          .lanes = lanes,
          .lane = lane};
}

// Wraps a pipe and fails when it is read.
class BrokenPipe final : public Pipe {
 public:
  explicit BrokenPipe(std::unique_ptr<Pipe> behind) : behind_(std::move(behind)) {}
  size_t read(std::span<iovec>) override { throw std::bad_alloc(); }
  size_t write(std::span<iovec> from) override { return behind_->write(from); }
  bool arm(bool reads, bool writes) override { return behind_->arm(reads, writes); }
  void disarm() override { behind_->disarm(); }
  short poll_events(bool reads, bool writes) const override {
    return behind_->poll_events(reads, writes);
  }
  int socket() const override { return behind_->socket(); }
  void end_writing() override { behind_->end_writing(); }
  bool delivered() const override { return behind_->delivered(); }
  size_t memory_bytes() const override { return behind_->memory_bytes(); }

 private:
  std::unique_ptr<Pipe> behind_;
};

}  // namespace

// Each segment of each step is in exactly one lane, and the conversion of its position can be reversed.
TEST(lanes_share_all_segments_and_none_twice) {
  const Program program(4, 2, 0, 2, 1, {}, {{Action::send, 0, {1}, 0, -1, -1, {}}});
  for (size_t lanes : {1, 2, 3, 7}) {
    for (size_t segments : {1, 3, 4, 5, 8, 9, 27, 56, 57, 200}) {
      std::vector<uint8_t> tensor(segments * kSegment - 5);
      std::set<uint64_t> seen;
      for (size_t lane = 0; lane < lanes; ++lane) {
        const Call call = call_of(program, {{tensor.data(), tensor.size()}}, lane, lanes);
        const Cut cut(call, nullptr);
        CHECK((cut.segments != 0) == (lane < Cut::lanes_used(call)));
        for (uint64_t segment = 0; segment < cut.segments_of(0); ++segment) {
          const uint64_t position = cut.position(segment);
          CHECK(seen.insert(position).second);
          CHECK(cut.in_this_lane(position));
          CHECK(cut.segment_at(position) == segment);
        }
      }
      CHECK(seen.size() == segments);
      CHECK(*seen.rbegin() == segments - 1);
    }
  }
}

TEST(all_reduce_in_lanes_sums) {
  over_both([](Transport transport) {
    for (int size : {2, 3, 5}) {
      LanedWorld world(size, transport, 3);
      const auto failures = world.run([&](int rank, Engine& engine) {
        const Program program = ring_all_reduce(size, rank);
        for (uint64_t number = 1; number <= 12; ++number) {
          // Some tensors are small and stay on the first lane.
          const size_t each = number % 3 == 0 ? 100 : 9'000 + 257 * number;
          std::vector<float> tensor(static_cast<size_t>(size) * each, static_cast<float>(rank + 1));
          all_reduce(engine, program, tensor, number, 20, world.lanes);
          const float want = static_cast<float>(size * (size + 1) / 2);
          for (float value : tensor) CHECK(value == want);
        }
      });
      CHECK(none(failures));
      // Each lane moves so much that its keys are replaced too.
      for (const auto& engine : world.engines) {
        const std::vector<uint64_t> rekeys = engine->account().rekeys;
        CHECK(std::accumulate(rekeys.begin(), rekeys.end(), uint64_t{0}) >= world.lanes);
      }
    }
  });
}

// The slots differ in length, and one is empty.
TEST(lanes_of_slots_that_differ_in_length) {
  LanedWorld world(2, Transport::tcp, 3);
  const size_t lengths[] = {0, 3 * kSegment, 4 * kSegment + 1, 30 * kSegment + 7};
  const auto failures = world.run([&](int rank, Engine& engine) {
    std::vector<Step> steps;
    for (int slot = 0; slot < 4; ++slot) {
      const Action action = rank == 0 ? Action::send : Action::receive;
      steps.push_back({action, slot, {1 - rank}, message(slot), -1, -1, {}});
    }
    const Program program(6, 2, rank, 2, 4, {}, std::move(steps));
    std::vector<std::vector<uint8_t>> memory;
    std::vector<Slot> slots;
    for (size_t length : lengths) {
      memory.emplace_back(length, rank == 0 ? 7 : 0);
    }
    for (auto& each : memory) slots.push_back({each.data(), each.size()});
    Call call = call_of(program, slots, 0, 3);
    call.number = 1;
    call.timeout_s = 20;
    engine.run(call);
    for (const auto& each : memory) {
      for (uint8_t byte : each) CHECK(byte == 7);
    }
  });
  CHECK(none(failures));
}

// threat: N1
TEST(no_two_lanes_share_a_key) {
  const KeyBytes key = pair_key(0, 1);
  const KeyBytes lanes = lanes_key(key);
  std::set<std::string> seen;
  const auto is_new = [&](const KeyBytes& each) {
    return seen.emplace(each.begin(), each.end()).second;
  };
  CHECK(is_new(key) && is_new(ratchet(key)) && is_new(gpu_key(key)) && is_new(lanes));
  for (size_t lane = 1; lane < kMaxLanes; ++lane) CHECK(is_new(lane_key(lanes, cpu_lane(lane))));
}

// A record that was moved from one lane of a pair to another has the wrong lane in its header, and another
// key.
// threat: N1
TEST(record_of_another_lane_is_refused) {
  const auto [near, far] = tcp_pair();
  Engine zero(0, 2, Context{}, group_key(0), kSegment, 50'000);
  const auto [first, other] = tcp_pair();
  zero.add_link(1, make_tcp_pipe(first), pair_key(0, 1), pair_key(1, 0), group_key(1));
  zero.add_lane_link(1, 1, make_tcp_pipe(near));
  // Records that rank 1 sealed for the first lane come over the second.
  End one(1, make_tcp_pipe(far), 50'000);
  const Program program(6, 2, 0, 2, 1, {}, {{Action::receive, 0, {1}, 0, -1, -1, {}}});
  std::vector<uint8_t> tensor(8 * kSegment);
  for (int i = 0; i < 4; ++i) one.enqueue(std::vector<uint8_t>(kSegment));
  one.link.flush();
  Call call = call_of(program, {{tensor.data(), tensor.size()}}, 0, 2);
  call.number = 1;
  call.timeout_s = 20;
  try {
    zero.run(call);
    CHECK(false && "did not fail");
  } catch (const Failure& failure) {
    CHECK(failure.code == FailureCode::tampered);
    CHECK(failure.peer == 1);
  }
  ::close(other);
}

// A failure of one lane ends the other lanes, on all ranks with the same error.
// threat: N6
TEST(lane_whose_thread_fails_ends_every_rank) {
  over_both([](Transport transport) {
    LanedWorld world(2, transport, 2);
    const auto [a, b] = tcp_pair();
    world.engines[0]->add_lane_link(2, 1, std::make_unique<BrokenPipe>(make_tcp_pipe(a)));
    world.engines[1]->add_lane_link(2, 0, make_tcp_pipe(b));
    const auto failures = world.run([&](int rank, Engine& engine) {
      const Program program = ring_all_reduce(2, rank);
      std::vector<float> tensor(200'000, 1.0f);
      all_reduce(engine, program, tensor, 1, 20, 3);
    });
    for (int rank : {0, 1}) {
      CHECK(failures[rank].has_value());
      if (!failures[rank]) continue;
      CHECK_NOTE(failures[rank]->code == FailureCode::closed, "%s", failures[rank]->what());
      CHECK(failures[rank]->reported_by == (rank == 0 ? -1 : 0));
      CHECK(std::string(failures[rank]->what()).starts_with("a thread of rank 0 failed"));
    }
  });
}

TEST(silent_rank_is_named_in_lanes) {
  over_both([](Transport transport) {
    LanedWorld world(2, transport, 3);
    const Program program = ring_all_reduce(2, 0);
    std::vector<float> tensor(60'000, 1.0f);
    try {
      all_reduce(*world.engines[0], program, tensor, 1, 0.1, world.lanes);
      CHECK(false && "did not fail");
    } catch (const Failure& failure) {
      CHECK(failure.code == FailureCode::peer_silent);
      CHECK(failure.peer == 1);
    }
  });
}

TEST(interrupt_ends_all_lanes) {
  LanedWorld world(2, Transport::shm, 3);
  std::thread interrupter([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    world.engines[0]->interrupt();
  });
  const auto failures = world.run([&](int rank, Engine& engine) {
    if (rank == 1) return;  // never comes, so that the other waits
    const Program program = ring_all_reduce(2, rank);
    std::vector<float> tensor(60'000, 1.0f);
    all_reduce(engine, program, tensor, 1, 20, world.lanes);
  });
  interrupter.join();
  CHECK(failures[0] && failures[0]->code == FailureCode::closed);
}

// The caller's thread has finished its own lane and waits for the others: a signal must still get through.
TEST(signal_ends_lanes_that_outlast_the_first) {
  LanedWorld world(2, Transport::tcp, 2);
  const auto failures = world.run([&](int rank, Engine& engine) {
    const Action action = rank == 0 ? Action::receive : Action::send;
    const Program program(6, 2, rank, 2, 1, {}, {{action, 0, {1 - rank}, 0, -1, -1, {}}});
    std::vector<uint8_t> tensor((rank == 0 ? 8 : 4) * kSegment);
    Call call = call_of(program, {{tensor.data(), tensor.size()}}, 0, rank == 0 ? 2 : 1);
    call.number = 1;
    call.timeout_s = 20;
    // In the first lane both ranks agree on what is sent; in the second lane nothing comes.
    call.total = 8 * kSegment;
    call.signal_pending = [] { return true; };
    engine.run(call);
  });
  CHECK(failures[0] && failures[0]->code == FailureCode::closed);
}

// threat: N2
TEST(lanes_that_do_not_fit_are_refused) {
  LanedWorld world(2, Transport::tcp, 2);
  Engine& engine = *world.engines[0];
  const auto add = [&](size_t lane, int peer) {
    const auto [a, b] = tcp_pair();
    ::close(b);
    engine.add_lane_link(lane, peer, make_tcp_pipe(a));
  };
  CHECK_THROWS(std::invalid_argument, add(0, 1));
  // The same lane a second time, under the same keys.
  CHECK_THROWS(std::invalid_argument, add(1, 1));
  CHECK_THROWS(std::invalid_argument, add(3, 1));
  CHECK_THROWS(std::invalid_argument, add(1, 0));
  CHECK_THROWS(std::invalid_argument, add(1, 2));
  const Program program = ring_all_reduce(2, 0);
  std::vector<float> tensor(2, 1.0f);
  CHECK_THROWS(std::invalid_argument, all_reduce(engine, program, tensor, 1, 1, 3));
  CHECK_THROWS(std::invalid_argument, all_reduce(engine, program, tensor, 1, 1, 0));
  engine.drop_lanes({1});
  CHECK_THROWS(std::invalid_argument, add(2, 1));  // the dropped lanes' keys must not be used again
  CHECK_THROWS(std::invalid_argument, all_reduce(engine, program, tensor, 1, 1, 2));
}

TEST(a_pair_whose_lanes_are_dropped_leaves_the_others_theirs) {
  LanedWorld world(3, Transport::tcp, 2);
  world.engines[0]->drop_lanes({1});
  world.engines[1]->drop_lanes({0});
  const auto program_to = [](int receiver, int rank) {
    std::vector<Step> steps;
    if (rank == 0) steps = {{Action::send, 0, {receiver}, 0, -1, -1, {}}};
    if (rank == receiver) steps = {{Action::receive, 0, {0}, 0, -1, -1, {}}};
    return Program(6, 2, rank, 3, 1, {}, std::move(steps));
  };
  const auto run = [](Engine& engine, const Program& program, std::vector<uint8_t>& memory) {
    Call call = call_of(program, {{memory.data(), memory.size()}}, 0, 2);
    call.number = 1;
    call.timeout_s = 20;
    call.total = memory.size();
    engine.run(call);
  };
  const auto failures = world.run([&](int rank, Engine& engine) {
    std::vector<uint8_t> memory(8 * kSegment, rank == 0 ? 7 : 0);
    run(engine, program_to(2, rank), memory);
    if (rank == 2) CHECK(memory == std::vector<uint8_t>(8 * kSegment, 7));
  });
  CHECK(none(failures));
  std::vector<uint8_t> memory(8 * kSegment);
  CHECK_THROWS(std::invalid_argument, run(*world.engines[0], program_to(1, 0), memory));
  const auto [a, b] = tcp_pair();
  CHECK_THROWS(std::invalid_argument, world.engines[0]->add_lane_link(1, 1, make_tcp_pipe(a)));
  ::close(b);
}

// With those keys somebody could later open what lanes sealed under keys they have since replaced.
// threat: N3
TEST(keys_of_lanes_are_forgotten_when_all_are_made) {
  LanedWorld world(2, Transport::tcp, 2);
  const auto [a, b] = tcp_pair();
  for (int rank : {0, 1}) world.engines[rank]->complete_lanes({1 - rank});
  CHECK_THROWS(std::invalid_argument, world.engines[0]->add_lane_link(2, 1, make_tcp_pipe(a)));
  ::close(b);
  const auto failures = world.run([&](int rank, Engine& engine) {
    const Program program = ring_all_reduce(2, rank);
    std::vector<float> tensor(60'000, 1.0f);
    all_reduce(engine, program, tensor, 1, 20, world.lanes);
    for (float value : tensor) CHECK(value == 2.0f);
  });
  CHECK(none(failures));
}

// threat: N3
TEST(link_forgets_the_keys_of_its_lanes) {
  BufferPool pool(kSegment);
  Keyring keyring{.rank = 0, .context = {}, .own_group = nullptr, .groups = {}};
  keyring.lanes_keys.resize(2);
  const auto [a, b] = tcp_pair();
  Link link(1, make_tcp_pipe(a), pair_key(0, 1), pair_key(1, 0), 50'000, keyring, pool);
  CHECK(link.lane_send_key(2) == lane_key(lanes_key(pair_key(0, 1)), 2));
  CHECK(link.lane_receive_key(2) == lane_key(lanes_key(pair_key(1, 0)), 2));
  link.forget_lanes_keys();
  CHECK_THROWS(std::bad_optional_access, link.lane_send_key(2));
  CHECK_THROWS(std::bad_optional_access, link.lane_receive_key(2));
  ::close(b);
}

// A rank whose tensors are short does not read the further lanes. Status records sent to it there, in one
// collective after another, would fill the pipe, and the senders would wait for room.
TEST(nothing_is_said_to_a_rank_that_does_not_read_the_lane) {
  World world(3, Transport::tcp);
  const auto [near, unread] = tcp_pair();
  const auto [one, two] = tcp_pair();
  world.engines[1]->add_lane_link(1, 0, make_tcp_pipe(near));
  world.engines[1]->add_lane_link(1, 2, make_tcp_pipe(one));
  world.engines[2]->add_lane_link(1, 1, make_tcp_pipe(two));
  const auto failures = world.run([&](int rank, Engine& engine) {
    // Rank 2 sends rank 1 a long tensor, and rank 1 sends rank 0 a short one.
    std::vector<Step> steps;
    if (rank == 0) steps = {{Action::receive, 0, {1}, 0, -1, -1, {}}};
    if (rank == 1)
      steps = {{Action::send, 0, {0}, 0, -1, -1, {}}, {Action::receive, 1, {2}, 0, -1, -1, {}}};
    if (rank == 2) steps = {{Action::send, 1, {1}, 0, -1, -1, {}}};
    const Program program(6, 2, rank, 3, 2, {}, std::move(steps));
    std::vector<uint8_t> brief(kSegment), lengthy(rank == 0 ? kSegment : 8 * kSegment);
    Call call = call_of(program, {{brief.data(), brief.size()}, {lengthy.data(), lengthy.size()}},
                        0, rank == 0 ? 1 : 2);
    call.number = 1;
    call.timeout_s = 20;
    // Rank 1 waits long enough to send its status, in both lanes.
    if (rank == 2) std::this_thread::sleep_for(std::chrono::milliseconds(800));
    engine.run(call);
  });
  CHECK(none(failures));
  uint8_t byte;
  CHECK(::recv(unread, &byte, 1, MSG_DONTWAIT) == -1);
  ::close(unread);
}

int main(int argc, char** argv) { return run(argc, argv); }
