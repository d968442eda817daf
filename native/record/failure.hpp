// The ways in which a collective or a message can fail. Python's errors.py has one class for each.
//
// A failure's text is written once, by the rank that sees the failure, and for people: ranks by their numbers
// in the job, codes by their names (names.hpp). The text travels in alerts and is shown unchanged.
#pragma once

#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>

namespace sealring {

// The numbers travel in alert records (docs/spec.md, "Alerts") and never change their meaning.
enum class FailureCode : uint8_t {
  tampered = 1,
  missing = 2,
  replayed = 3,
  out_of_step = 4,
  peer_lost = 5,
  peer_silent = 6,
  closed = 7,
  no_longer_admitted = 8,
};

inline bool is_failure_code(uint8_t value) { return value >= 1 && value <= 8; }

// Thrown anywhere below the engine's loop; the loop tells the other ranks and closes the group.
struct Failure : std::runtime_error {
  Failure(FailureCode code, int peer, const std::string& text)
      : std::runtime_error(text), code(code), peer(peer) {}

  FailureCode code;
  int peer;  // the rank that the failure is about; -1 if none
  uint64_t collective = 0;  // filled in by the engine
  int reported_by = -1;  // the rank that saw it, according to told_by; -1: this rank
  int told_by = -1;  // the rank whose alert reported it; -1 if there was none
  std::map<int, std::string> views;  // by rank: "rank 5: " and what that rank says it was doing

  // The text, followed by what each rank says it was doing.
  std::string text() const;

  // Whether both describe the same failure, however it is worded and whichever rank passed it on.
  bool says_the_same_as(const Failure& other) const {
    return code == other.code && peer == other.peer && collective == other.collective &&
           reported_by == other.reported_by;
  }
};

// Each of these three texts begins like the error of Gloo, or of torch's wrapper of it: scripts and tools
// look for these words.
Failure peer_was_silent(int peer, const std::string& what, double seconds);
Failure peer_closed(int peer, const std::string& what);
Failure ranks_disagree(int peer, const std::string& what);

}  // namespace sealring
