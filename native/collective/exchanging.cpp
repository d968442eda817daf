#include "collective/exchanging.hpp"

#include <algorithm>
#include <iterator>
#include <stdexcept>
#include <utility>

#include "collective/collective.hpp"

namespace sealring {

Exchanging::Exchanging(const Cut& cut, const Wires& wires)
    : rank_(cut.program.rank),
      channels_(wires.channels),
      rounds_(cut, wires),
      ended_(wires.channels.count(), 0) {
  refill();
}

bool Exchanging::Live::complete() const {
  return std::all_of(parts.begin(), parts.end(), [](const Part& part) { return part.complete; });
}

Exchanging::Part* Exchanging::Live::on(size_t channel) {
  const auto found = std::find_if(parts.begin(), parts.end(), [channel](const Part& part) {
    return part.exchange.channel == channel;
  });
  return found == parts.end() ? nullptr : &*found;
}

// Fills `live_` until it holds two incomplete rounds or no round is left. Rounds without exchanges are
// skipped.
void Exchanging::refill() {
  const auto waits = [](const Live& live) { return !live.complete(); };
  while (std::count_if(live_.begin(), live_.end(), waits) < 2 && next_ < rounds_.count()) {
    const uint64_t number = next_++;
    Round round = rounds_.round(number);
    std::vector<Part> parts;
    for (Exchange& each : rounds_.exchanges(round)) {
      const size_t sends = each.sends.size(), receives = each.receives.size();
      parts.push_back({std::move(each), sends, receives});
    }
    if (parts.empty()) continue;
    const size_t receives = round.receives.size();
    live_.push_back(
        {number, std::move(round), std::move(parts), receives, std::vector<bool>(receives)});
  }
  const auto first = std::find_if(live_.begin(), live_.end(), waits);
  current_ = first == live_.end() ? next_ : first->number;
}

Exchanging::Live& Exchanging::find(uint64_t round) {
  for (Live& live : live_) {
    if (live.number == round) return live;
  }
  throw std::logic_error("no such round is under way");
}

uint8_t* Exchanging::place_to_seal(uint64_t segment, int step) {
  for (const Placed& each : find(rounds_.of(segment, step)).round.sends) {
    if (each.segment == segment && each.step == step) return each.at;
  }
  throw std::logic_error("no such record is in its round");
}

void Exchanging::sealed(uint64_t round, const std::vector<int>& peers) {
  Live& live = find(round);
  for (int peer : peers) --live.on(channels_.of(rank_, peer))->unsealed;
}

bool Exchanging::announce(Announced record) {
  Live& live = find(record.round);
  for (size_t i = 0; i < live.round.receives.size(); ++i) {
    const Placed& each = live.round.receives[i];
    if (each.segment != record.segment || each.step != record.step) continue;
    if (live.seen[i]) return false;
    live.seen[i] = true;
    Part& part = *live.on(channels_.of(record.peer, rank_));
    --part.unannounced;
    record.at = each.at;
    part.announced.push_back(std::move(record));
    return true;
  }
  throw std::logic_error("no such record is in its round");
}

bool Exchanging::awaits(const OpeningKey& key) const {
  const auto any_under_it = [&key](const std::vector<Announced>& records) {
    return std::any_of(records.begin(), records.end(),
                       [&key](const Announced& each) { return each.key == &key; });
  };
  return any_under_it(arrived_) || std::any_of(live_.begin(), live_.end(), [&](const Live& live) {
           return std::any_of(live.parts.begin(), live.parts.end(),
                              [&](const Part& part) { return any_under_it(part.announced); });
         });
}

// Received records overwrite the half of the area that the round two before this one used, so that round must
// have been opened.
bool Exchanging::may_begin(const Live& live, const Part& part) const {
  if (part.unsealed != 0 || part.unannounced != 0) return false;
  return part.exchange.receives.empty() ||
         std::none_of(live_.begin(), live_.end(), [&](const Live& other) {
           return other.number < live.number && other.number % 2 == live.number % 2;
         });
}

// Begins exchanges in the order of rounds, which both ends of each message follow.
bool Exchanging::begin(size_t channel, Device& device) {
  bool moved = false;
  for (Live& live : live_) {
    Part* const part = live.on(channel);
    if (part == nullptr || part->begun) continue;
    if (!may_begin(live, *part) || !device.exchange(part->exchange)) break;
    part->begun = moved = true;
  }
  return moved;
}

bool Exchanging::end(size_t channel, Device& device) {
  bool moved = false;
  uint64_t completed = 0;
  for (Live& live : live_) {
    Part* const part = live.on(channel);
    if (part == nullptr || !part->under_way()) continue;
    if (!moved) completed = device.exchanged(channel);
    if (ended_[channel] == completed) break;
    ++ended_[channel];
    part->complete = moved = true;
    std::move(part->announced.begin(), part->announced.end(), std::back_inserter(arrived_));
    part->announced.clear();
  }
  return moved;
}

bool Exchanging::advance(Device& device) {
  bool moved = false;
  for (size_t channel = 0; channel < channels_.count(); ++channel) {
    moved |= begin(channel, device);
    moved |= end(channel, device);
  }
  while (!live_.empty() && live_.front().complete() && live_.front().unopened == 0)
    live_.pop_front();
  refill();
  return moved;
}

bool Exchanging::under_way() const {
  return std::any_of(live_.begin(), live_.end(), [](const Live& live) {
    return std::any_of(live.parts.begin(), live.parts.end(),
                       [](const Part& part) { return part.under_way(); });
  });
}

std::vector<int> Exchanging::awaited_peers() const {
  std::vector<int> out;
  for (const Live& live : live_) {
    for (const Part& part : live.parts) {
      if (!part.under_way()) continue;
      for (const Transfer& each : part.exchange.receives) out.push_back(each.peer);
      for (const Transfer& each : part.exchange.sends) out.push_back(each.peer);
    }
    if (!out.empty()) break;
  }
  return out;
}

}  // namespace sealring
