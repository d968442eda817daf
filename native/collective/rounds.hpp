// In which round of exchanges each record of a collective goes, where devices exchange records.
//
// Exchanges are numbered by rounds, alike on all ranks. A step of level l goes, in segment s, in round
// s * stride + l * kGap: so a round carries the first level of one segment and later levels of earlier
// ones. Between two levels of a segment lies another round, during which the device opens what came and
// seals what goes next. A rank takes no part in rounds that have none of its records. A round is one exchange
// on each channel that carries records of it (device/channels.hpp).
#pragma once

#include <cstdint>
#include <vector>

#include "collective/program.hpp"
#include "device/exchange.hpp"
#include "device/wires.hpp"

namespace sealring {

struct Cut;

// A record's place in a round.
struct Placed {
  uint64_t segment;
  int step;
  uint8_t* at;
  size_t bytes;
};

struct Round {
  std::vector<Placed> sends, receives;
};

class Rounds {
 public:
  static constexpr uint64_t kGap = 2;

  Rounds(const Cut& cut, const Wires& wires);

  // Segments that are open at once, at least, so that no round waits for one that is not.
  static uint64_t window(uint32_t levels);
  static uint64_t stride(uint32_t levels);

  uint64_t of(uint64_t segment, int step) const;
  uint64_t count() const { return count_; }
  Round round(uint64_t number) const;
  // A round's exchanges, by channel.
  std::vector<Exchange> exchanges(const Round& round) const;
  // All rounds of this rank, with the commands that come before each; `more` are in any of them.
  std::vector<ExchangeRound> all(uint64_t more) const;

 private:
  bool in_rounds(const Step& step) const {
    return !step.peers.empty() && wires_.exchanges_with(step.peers[0]);
  }
  Placed place(uint64_t number, uint64_t segment, int step, uint8_t* area, size_t index) const;

  const Cut& cut_;
  const Program& program_;
  const Wires& wires_;
  const uint64_t stride_;
  uint64_t count_ = 0;
};

}  // namespace sealring
