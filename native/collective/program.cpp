#include "collective/program.hpp"

#include <algorithm>

namespace sealring {
namespace {

[[noreturn]] void malformed(size_t step, const char* what) {
  throw std::invalid_argument("step " + std::to_string(step) + " of the program: " + what);
}

}  // namespace

Program::Program(uint8_t operation, uint8_t algorithm, int rank, int world, int slots,
                 std::vector<int> scratch_like, std::vector<Step> program_steps, uint32_t levels)
    : operation(operation),
      algorithm(algorithm),
      rank(rank),
      world(world),
      slots(slots),
      scratch(std::move(scratch_like)),
      steps(std::move(program_steps)),
      levels(levels),
      successors(steps.size()),
      forwards(steps.size()),
      waits(steps.size(), 0),
      receives_from(static_cast<size_t>(world < 0 ? 0 : world), 0),
      receiving_(receives_from.size()) {
  if (rank < 0 || rank >= world || slots < 1) throw std::invalid_argument("malformed program");
  for (int like : scratch) {
    if (like < 0 || like >= slots)
      throw std::invalid_argument("scratch like a slot that is not there");
  }
  const int all_slots = slots + static_cast<int>(scratch.size());
  std::vector<int> forwarded_to(receives_from.size(), 0);
  for (size_t i = 0; i < steps.size(); ++i) {
    const Step& step = steps[i];
    if (step.slot < 0 || step.slot >= all_slots) malformed(i, "no such slot");
    if (step.level >= levels) malformed(i, "no such level");
    for (int peer : step.peers) {
      if (peer < 0 || peer >= world || peer == rank) malformed(i, "no such peer");
    }
    switch (step.action) {
      case Action::send:
      case Action::receive:
      case Action::receive_reduce:
        if (step.peers.size() != 1) malformed(i, "needs exactly one peer");
        if (step.origin >= world) malformed(i, "no such origin");
        break;
      case Action::publish:
        if (step.peers.empty()) malformed(i, "publishes to no rank");
        break;
      case Action::forward: {
        if (step.source < 0 || static_cast<size_t>(step.source) >= i ||
            !receives(steps[step.source].action) || step.peers.empty()) {
          malformed(i, "forwards what was not received");
        }
        forwards[step.source].push_back(static_cast<int>(i));
        for (int peer : step.peers) {
          // The engine plans its memory for this: one record of each rank except ours and the peer's.
          if (++forwarded_to[peer] > world - 2) malformed(i, "forwards too much over one link");
        }
        break;
      }
      case Action::copy:
      case Action::reduce:
        if (step.source < 0 || step.source >= all_slots) malformed(i, "no such source slot");
        break;
      case Action::average:
      case Action::premultiply:
        break;
      default:
        malformed(i, "no such action");
    }
    for (int before : step.after) {
      if (before < 0 || static_cast<size_t>(before) >= i) malformed(i, "waits for a later step");
      if (step.action == Action::forward) continue;  // runs with the receive it belongs to
      successors[before].push_back(static_cast<int>(i));
      ++waits[i];
    }
    if (receives(step.action)) {
      receiving_[step.peers[0]].push_back(static_cast<int>(i));
      ++receives_from[step.peers[0]];
    }
  }
  for (int peer = 0; peer < world; ++peer) {
    if (receives_from[peer] != 0) sources.push_back(peer);
  }
}

int Program::receiving_step(int peer, int origin, uint32_t message) const {
  for (int step : receiving_[peer]) {
    if (steps[step].message == message && steps[step].origin == origin) return step;
  }
  return -1;
}

}  // namespace sealring
