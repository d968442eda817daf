// Assigns each record of a collective to a round of exchanges, if devices exchange records.
//
// All ranks number the rounds alike. A step of level l in segment s goes in round s * stride + l * kGap. So a
// round carries the first level of one segment and later levels of earlier segments. Between two levels of a
// segment lies another round, during which the device opens what came and seals what goes next. A rank takes
// no part in rounds that have none of its records. A round is one exchange on each channel that carries
// records of it (device/channels.hpp).
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

  // How many segments must be open at once, so that no round waits for a segment that is not open.
  static uint64_t window(uint32_t levels);
  static uint64_t stride(uint32_t levels);

  uint64_t of(uint64_t segment, int step) const;
  uint64_t count() const { return count_; }
  Round round(uint64_t number) const;
  // A round's exchanges, by channel.
  std::vector<Exchange> exchanges(const Round& round) const;
  // All rounds of this rank, each with the most commands that may come before it. `more` is added to each.
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
