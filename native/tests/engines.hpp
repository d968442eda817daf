// Whole engines in one process, one thread for each rank, for tests of what they do together.
#pragma once

#include <cstdio>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "collective/engine.hpp"
#include "two_ends.hpp"

namespace sealring::testing {

enum class Transport { tcp, shm };

class World {
 public:
  World(int size, Transport transport) : size(size) {
    for (int rank = 0; rank < size; ++rank) {
      engines.push_back(
          std::make_unique<Engine>(rank, size, Context{}, group_key(rank), 1024, 50'000));
    }
    for (int low = 0; low < size; ++low) {
      for (int high = low + 1; high < size; ++high) connect(low, high, transport);
    }
  }

  // Runs `body` for every rank, each in its own thread. Returns, by rank, the failures that they ended with.
  template <typename Body>
  std::vector<std::optional<Failure>> run(Body body) {
    std::vector<std::optional<Failure>> failures(size);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size; ++rank) {
      threads.emplace_back([&, rank] {
        try {
          body(rank, *engines[rank]);
        } catch (const Failure& failure) {
          failures[rank] = failure;
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    return failures;
  }

  // Adds a lane between all ranks.
  void add_lane(size_t lane, Transport transport) {
    for (int low = 0; low < size; ++low) {
      for (int high = low + 1; high < size; ++high) {
        const auto [a, b] = tcp_pair();
        std::unique_ptr<SharedMemory> memory;
        if (transport == Transport::shm) memory = std::make_unique<SharedMemory>();
        engines[low]->add_lane_link(lane, high, TwoEnds::pipe(a, memory.get(), 0));
        engines[high]->add_lane_link(lane, low, TwoEnds::pipe(b, memory.get(), 1));
      }
    }
  }

  const int size;
  std::vector<std::unique_ptr<Engine>> engines;

 private:
  void connect(int low, int high, Transport transport) {
    const auto [a, b] = tcp_pair();
    std::unique_ptr<SharedMemory> memory;
    if (transport == Transport::shm) memory = std::make_unique<SharedMemory>();
    engines[low]->add_link(high, TwoEnds::pipe(a, memory.get(), 0), pair_key(low, high),
                           pair_key(high, low), group_key(high));
    engines[high]->add_link(low, TwoEnds::pipe(b, memory.get(), 1), pair_key(high, low),
                            pair_key(low, high), group_key(low));
  }
};

inline std::vector<Slot> cut(std::vector<float>& tensor, int parts) {
  std::vector<Slot> slots;
  const size_t each = tensor.size() / static_cast<size_t>(parts);
  for (int part = 0; part < parts; ++part) {
    slots.push_back(
        {reinterpret_cast<uint8_t*>(tensor.data() + each * part), each * sizeof(float)});
  }
  return slots;
}

// An all_reduce of `tensor`, which is written in place.
inline Call call_of(const Program& program, std::vector<float>& tensor, uint64_t number,
                    double timeout_s = 20, size_t lanes = 1) {
  return Call{.program = &program,
              .slots = cut(tensor, program.slots),
              .number = number,
              .total = tensor.size() * 4,
              .root = 0,
              .dtype = DType::float32,
              .reduction = ReduceKind::sum,
              .factor = 1.0,
              .segment_bytes = 1024,
              .timeout_s = timeout_s,
              .lanes = lanes};
}

inline void all_reduce(Engine& engine, const Program& program, std::vector<float>& tensor,
                       uint64_t number, double timeout_s = 20, size_t lanes = 1) {
  engine.run(call_of(program, tensor, number, timeout_s, lanes));
}

inline bool none(const std::vector<std::optional<Failure>>& failures) {
  for (const auto& failure : failures) {
    if (failure) return std::printf("  %s\n", failure->what()), false;
  }
  return true;
}

template <typename Body>
void over_both(Body body) {
  body(Transport::tcp);
  body(Transport::shm);
}

}  // namespace sealring::testing
