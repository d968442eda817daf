#include "collective/rounds.hpp"

#include <algorithm>
#include <stdexcept>
#include <tuple>
#include <utility>

#include "collective/collective.hpp"

namespace sealring {
namespace {

// Limits the window: a program whose levels span more rounds than this starts its segments further apart.
constexpr uint64_t kMostRoundsApart = 12;

uint64_t span_of(uint32_t levels) { return (std::max<uint32_t>(levels, 1) - 1) * Rounds::kGap; }

}  // namespace

Rounds::Rounds(const Cut& cut, const Wires& wires)
    : cut_(cut), program_(cut.program), wires_(wires), stride_(stride(cut.program.levels)) {
  for (size_t step = 0; step < program_.steps.size(); ++step) {
    if (!in_rounds(program_.steps[step])) continue;
    const int index = static_cast<int>(step);
    count_ = std::max(count_, of(cut_.segments_of(index) - 1, index) + 1);
  }
}

uint64_t Rounds::stride(uint32_t levels) {
  return std::max<uint64_t>(1, (span_of(levels) + kMostRoundsApart - 1) / kMostRoundsApart);
}

uint64_t Rounds::window(uint32_t levels) { return span_of(levels) / stride(levels) + 4; }

uint64_t Rounds::of(uint64_t segment, int step) const {
  return segment * stride_ + program_.steps[static_cast<size_t>(step)].level * kGap;
}

Placed Rounds::place(uint64_t number, uint64_t segment, int step, uint8_t* area,
                     size_t index) const {
  const size_t stride = run_stride(cut_.segment_bytes);
  if ((index + 1) * stride > wires_.half_bytes)
    throw std::invalid_argument("the segments are too long for an exchange");
  return {segment, step, area + number % 2 * wires_.half_bytes + index * stride,
          sealed_run_bytes(cut_.segment_length(cut_.position(segment), program_.steps[step].slot))};
}

// Lists a round's records in an order that both ends know, because NCCL matches the messages of a pair by
// order alone.
Round Rounds::round(uint64_t number) const {
  struct Found {
    uint64_t segment;
    uint32_t message;
    int step;
  };
  std::vector<Found> found;
  for (size_t index = 0; index < program_.steps.size(); ++index) {
    const Step& step = program_.steps[index];
    const uint64_t before = step.level * kGap;
    if (!in_rounds(step) || number < before || (number - before) % stride_ != 0) continue;
    const uint64_t segment = (number - before) / stride_;
    if (segment < cut_.segments_of(static_cast<int>(index)))
      found.push_back({segment, step.message, static_cast<int>(index)});
  }
  std::sort(found.begin(), found.end(), [](const Found& a, const Found& b) {
    return std::tie(a.segment, a.message, a.step) < std::tie(b.segment, b.message, b.step);
  });
  Round out;
  for (const Found& each : found) {
    const bool comes = receives(program_.steps[static_cast<size_t>(each.step)].action);
    std::vector<Placed>& side = comes ? out.receives : out.sends;
    side.push_back(place(number, each.segment, each.step, comes ? wires_.arriving : wires_.leaving,
                         side.size()));
  }
  return out;
}

std::vector<Exchange> Rounds::exchanges(const Round& round) const {
  const Channels& channels = wires_.channels;
  std::vector<Exchange> out(channels.count());
  for (size_t channel = 0; channel < out.size(); ++channel) out[channel].channel = channel;
  for (const Placed& each : round.sends) {
    for (int peer : program_.steps[static_cast<size_t>(each.step)].peers)
      out[channels.of(program_.rank, peer)].sends.push_back({peer, each.at, each.bytes});
  }
  for (const Placed& each : round.receives) {
    const int peer = program_.steps[static_cast<size_t>(each.step)].peers[0];
    out[channels.of(peer, program_.rank)].receives.push_back({peer, each.at, each.bytes});
  }
  std::erase_if(out,
                [](const Exchange& each) { return each.sends.empty() && each.receives.empty(); });
  return out;
}

std::vector<ExchangeRound> Rounds::all(uint64_t more) const {
  std::vector<ExchangeRound> out;
  const uint64_t others =
      static_cast<uint64_t>(std::count_if(program_.steps.begin(), program_.steps.end(),
                                          [this](const Step& step) { return !in_rounds(step); }));
  uint64_t records = 0;  // in all rounds up to and including the next
  for (uint64_t number = 0; number < count_ + 1; ++number) {
    const Round next = round(number);
    records += next.sends.size() + next.receives.size();
    if (number == 0) continue;
    std::vector<Exchange> own = exchanges(round(number - 1));
    if (own.empty()) continue;
    const uint64_t opened = std::min(cut_.segments, number / stride_ + cut_.window + 1);
    out.push_back({std::move(own), static_cast<uint32_t>(std::min<uint64_t>(
                                       UINT32_MAX, records + others * opened + more))});
  }
  return out;
}

}  // namespace sealring
