// The ways in which a collective can end badly. Python's errors.py has one class for each.
#pragma once

#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>

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
  int peer;                 // the rank it is about, -1 if none
  uint64_t collective = 0;  // filled in by the engine
  int reported_by = -1;     // the rank that saw it, -1 if this one did
  std::map<int, std::string> views;  // what each rank says it was doing, by rank

  // Whatever words it has, and however many views were heard.
  bool says_the_same_as(const Failure& other) const {
    return code == other.code && peer == other.peer && collective == other.collective &&
           reported_by == other.reported_by;
  }
};

}  // namespace sealring
