// What a rank does while it waits for its peers (sends and reads status, names the late rank), and what a
// signal handler may call then.

#include <atomic>
#include <chrono>
#include <stdexcept>
#include <string>
#include <thread>

#include "check.hpp"
#include "engines.hpp"
#include "programs.hpp"

using namespace sealring;
using namespace sealring::testing;

namespace {

// The pipes of a process that is stopped after it has written a number of bytes: nothing moves any more, and
// nothing ends.
class StoppingPipe final : public Pipe {
 public:
  StoppingPipe(std::unique_ptr<Pipe> behind, std::atomic<long>& left)
      : behind_(std::move(behind)), left_(left) {}
  size_t read(std::span<iovec> into) override { return left_ > 0 ? behind_->read(into) : 0; }
  size_t write(std::span<iovec> from) override {
    if (left_ <= 0) return 0;
    const size_t written = behind_->write(from);
    left_ -= static_cast<long>(written);
    return written;
  }
  bool arm(bool reads, bool writes) override { return left_ <= 0 || behind_->arm(reads, writes); }
  void disarm() override { behind_->disarm(); }
  short poll_events(bool reads, bool writes) const override {
    return left_ > 0 ? behind_->poll_events(reads, writes) : short{0};
  }
  int socket() const override { return behind_->socket(); }
  void end_writing() override {}
  bool delivered() const override { return true; }
  size_t memory_bytes() const override { return 0; }

 private:
  std::unique_ptr<Pipe> behind_;
  std::atomic<long>& left_;
};

void connect(std::vector<std::unique_ptr<Engine>>& engines, int low, int high,
             std::unique_ptr<Pipe> near, std::unique_ptr<Pipe> far) {
  engines[low]->add_link(high, std::move(near), pair_key(low, high), pair_key(high, low),
                         group_key(high));
  engines[high]->add_link(low, std::move(far), pair_key(high, low), pair_key(low, high),
                          group_key(low));
}

}  // namespace

// Rank 1 waits for the others and sends its status. They come, records move, and then rank 1 is stopped. Rank
// 0 waits for rank 2, and rank 2 for rank 1. Both must name rank 1, although it once said that it waits.
TEST(rank_that_was_stopped_after_it_had_waited_is_named) {
  std::vector<std::unique_ptr<Engine>> engines;
  for (int rank = 0; rank < 3; ++rank) {
    engines.push_back(std::make_unique<Engine>(rank, 3, Context{}, group_key(rank), 1024, 50'000));
  }
  // Enough bytes for four records that leave at once, the status records, and one or two more records.
  std::atomic<long> left{6500};
  const auto [a, b] = tcp_pair();
  const auto [c, d] = tcp_pair();
  const auto [e, f] = tcp_pair();
  connect(engines, 0, 1, make_tcp_pipe(a), std::make_unique<StoppingPipe>(make_tcp_pipe(b), left));
  connect(engines, 1, 2, std::make_unique<StoppingPipe>(make_tcp_pipe(c), left), make_tcp_pipe(d));
  connect(engines, 0, 2, make_tcp_pipe(e), make_tcp_pipe(f));
  std::vector<std::optional<Failure>> failures(3);
  std::atomic<int> failed{0};
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 3; ++rank) {
    threads.emplace_back([&, rank] {
      if (rank != 1) std::this_thread::sleep_for(std::chrono::milliseconds(800));
      const Program program = ring_all_reduce(3, rank);
      std::vector<float> tensor(30'000, 1.0f);
      try {
        // Rank 0 has the shortest timeout: it must find out by itself, before rank 2 tells it.
        const double timeouts[] = {2, 60, 4};
        all_reduce(*engines[rank], program, tensor, 1, timeouts[rank]);
      } catch (const Failure& failure) {
        failures[rank] = failure;
      }
      if (++failed == 2) engines[1]->interrupt();
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(left <= 0);
  for (int rank : {0, 2}) {
    CHECK(failures[rank].has_value());
    if (!failures[rank]) continue;
    CHECK_NOTE(failures[rank]->code == FailureCode::peer_silent, "%s", failures[rank]->what());
    CHECK_NOTE(failures[rank]->peer == 1, "rank %d: %s", rank, failures[rank]->what());
    if (rank == 0) CHECK_NOTE(failures[0]->reported_by == -1, "%s", failures[0]->what());
  }
}

// Status records between waiting ranks do not count as progress.
TEST(ranks_that_wait_for_one_that_never_comes_time_out) {
  World world(3, Transport::shm);
  const auto began = std::chrono::steady_clock::now();
  const auto failures = world.run([&](int rank, Engine& engine) {
    if (rank == 1) return;
    const Program program = ring_all_reduce(3, rank);
    std::vector<float> tensor(300, 1.0f);
    all_reduce(engine, program, tensor, 1, 1.5);
  });
  CHECK(std::chrono::steady_clock::now() - began < std::chrono::seconds(60));
  for (int rank : {0, 2}) {
    CHECK(failures[rank] && failures[rank]->code == FailureCode::peer_silent);
    CHECK(failures[rank] && failures[rank]->peer == 1);
  }
}

// Python calls the handler on the waiting thread. The group's functions that the handler calls must not wait
// for that thread.
TEST(handler_of_a_signal_does_not_wait_for_its_own_run) {
  const auto ends_with = [](size_t lanes, auto handler) {
    World world(2, Transport::tcp);
    if (lanes > 1) world.add_lane(1, Transport::tcp);
    Engine& engine = *world.engines[0];
    const Program program = ring_all_reduce(2, 0);
    std::vector<float> tensor(60'000, 1.0f);
    bool handled = false;
    CHECK(!engine.runs_here());
    Call call = call_of(program, tensor, 1, 20, lanes);
    call.signal_pending = [&] {
      CHECK(engine.runs_here());
      if (!handled) handler(engine, call);
      handled = true;
      return false;
    };
    try {
      engine.run(call);
      CHECK(false && "did not fail");
    } catch (const Failure& failure) {
      CHECK(!engine.runs_here());
      return failure;
    }
    return Failure(FailureCode::out_of_step, -1, "");
  };
  for (size_t lanes : {1, 2}) {
    const Failure closed = ends_with(lanes, [](Engine& engine, const Call&) { engine.close(); });
    CHECK(closed.code == FailureCode::closed);
    const Failure failed = ends_with(lanes, [](Engine& engine, const Call&) {
      engine.fail(Failure(FailureCode::tampered, 1, "seen elsewhere"));
    });
    CHECK(failed.code == FailureCode::tampered && failed.peer == 1);
    const Failure refused = ends_with(lanes, [](Engine& engine, const Call& call) {
      CHECK_THROWS(std::logic_error, engine.run(call));
      CHECK(!engine.release_device());
      engine.interrupt();
    });
    CHECK(refused.code == FailureCode::closed);
  }
}

int main(int argc, char** argv) { return run(argc, argv); }
