// Programs like those of schedule/, for tests of the engine without Python.
#pragma once

#include <cstdint>
#include <set>
#include <utility>
#include <vector>

#include "collective/program.hpp"

namespace sealring::testing {

// The part of schedule/program.py's writer that the tests need. A step waits for the last writer of what it
// reads, and for the last writer and all readers of what it overwrites.
class Writer {
 public:
  explicit Writer(int slots) : writer_(slots, -1), readers_(slots) {}

  int add(Step step, bool reads, bool writes) {
    const int index = static_cast<int>(steps.size());
    std::set<int> after(step.after.begin(), step.after.end());
    if ((reads || writes) && writer_[step.slot] >= 0) after.insert(writer_[step.slot]);
    if (writes) {
      after.insert(readers_[step.slot].begin(), readers_[step.slot].end());
      writer_[step.slot] = index;
      readers_[step.slot].clear();
    } else if (reads) {
      readers_[step.slot].push_back(index);
    }
    step.after.assign(after.begin(), after.end());
    steps.push_back(std::move(step));
    return index;
  }

  std::vector<Step> steps;

 private:
  std::vector<int> writer_;
  std::vector<std::vector<int>> readers_;
};

inline uint32_t message(int chunk) { return static_cast<uint32_t>(chunk); }

// schedule/ring.py's all_reduce.
inline Program ring_all_reduce(int world, int rank) {
  Writer writer(world);
  const int next = (rank + 1) % world, previous = (rank + world - 1) % world;
  const auto passing = [&](int hop) { return (rank + 2 * world - 1 - hop) % world; };
  for (int hop = 0; hop + 1 < world; ++hop) {
    const int leaving = passing(hop), arriving = passing(hop + 1);
    writer.add({Action::send, leaving, {next}, message(leaving), -1, -1, {}}, true, false);
    writer.add({Action::receive_reduce, arriving, {previous}, message(arriving), -1, -1, {}}, true,
               true);
  }
  if (world > 1) {
    writer.add({Action::publish, rank, {next}, message(rank), -1, -1, {}}, true, false);
  }
  for (int hop = 0; hop + 1 < world; ++hop) {
    const int chunk = passing(hop);
    const int received = writer.add(
        {Action::receive, chunk, {previous}, message(chunk), chunk, -1, {}}, false, true);
    if (chunk == next) continue;
    writer.add({Action::forward, chunk, {next}, message(chunk), chunk, received, {received}}, false,
               false);
  }
  return Program(1, 1, rank, world, world, {}, std::move(writer.steps));
}

// schedule/direct.py's broadcast from rank 0.
inline Program direct_broadcast(int world, int rank) {
  Writer writer(1);
  if (rank == 0) {
    std::vector<int> others;
    for (int peer = 1; peer < world; ++peer) others.push_back(peer);
    writer.add({Action::publish, 0, others, 0, -1, -1, {}}, true, false);
  } else {
    writer.add({Action::receive, 0, {0}, 0, 0, -1, {}}, false, true);
  }
  return Program(4, 2, rank, world, 1, {}, std::move(writer.steps));
}

// This rank's part of a broadcast from another rank.
inline Program receive_from(int root, int world, int rank) {
  Writer writer(1);
  writer.add({Action::receive, 0, {root}, 0, root, -1, {}}, false, true);
  return Program(4, 2, rank, world, 1, {}, std::move(writer.steps));
}

// Each rank sends its tensor to every other rank, and adds the others' tensors to its own.
inline Program direct_sum(int world, int rank) {
  Writer writer(1);
  for (int peer = 0; peer < world; ++peer) {
    if (peer != rank) writer.add({Action::send, 0, {peer}, message(rank), -1, -1, {}}, true, false);
  }
  for (int peer = 0; peer < world; ++peer) {
    if (peer == rank) continue;
    writer.add({Action::receive_reduce, 0, {peer}, message(peer), -1, -1, {}}, true, true);
  }
  return Program(1, 2, rank, world, 1, {}, std::move(writer.steps));
}

}  // namespace sealring::testing
