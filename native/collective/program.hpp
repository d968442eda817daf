// A collective as a program of steps, as schedule/program.py writes it.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace sealring {

// The numbers are those of schedule/program.py.
enum class Action : uint8_t {
  send = 0,
  publish = 1,
  forward = 2,
  receive = 3,
  receive_reduce = 4,
  copy = 5,
  reduce = 6,
  average = 7,
  premultiply = 8,
};

inline bool receives(Action action) {
  return action == Action::receive || action == Action::receive_reduce;
}

struct Step {
  Action action;
  int slot;
  std::vector<int> peers;
  uint32_t message;
  int origin;  // the rank that published the record to receive; -1: a pair record
  int source;  // the slot to read, or the step whose record is forwarded
  std::vector<int> after;
  // For a step with peers whose records are exchanged: how many exchanges of the same segment come before it.
  // Both ends of a message have the same level (schedule/levels.py).
  uint32_t level = 0;
};

class Program {
 public:
  Program(uint8_t operation, uint8_t algorithm, int rank, int world, int slots,
          std::vector<int> scratch, std::vector<Step> steps, uint32_t levels = 1);

  const uint8_t operation;
  const uint8_t algorithm;
  const int rank;
  const int world;
  const int slots;
  const std::vector<int> scratch;  // for each scratch slot the slot whose length it takes
  const std::vector<Step> steps;
  const uint32_t levels;  // how many levels there are, over all ranks' steps

  // Derived once, so that the engine's loop only looks things up.
  // By step: the steps that wait for it, without forwards.
  std::vector<std::vector<int>> successors;
  std::vector<std::vector<int>> forwards;  // by receiving step: its forwards
  std::vector<int> waits;  // by step: how many steps it waits for
  std::vector<int> receives_from;             // records per segment from each rank
  std::vector<int> sources;  // the ranks that send any record
  // The step that takes record (origin or -1, message) from a rank, or -1.
  int receiving_step(int peer, int origin, uint32_t message) const;

 private:
  std::vector<std::vector<int>> receiving_;   // by peer
};

}  // namespace sealring
