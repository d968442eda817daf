// Keeps track of the exchanges of a collective under way: which are sealed, announced, begun, complete and
// opened.
//
// A round is one exchange on each channel that has records of it. An exchange is begun when all that this
// rank sends in it is sealed, and when the headers of all that it receives have come over the links and were
// checked. Received records are opened when the exchange is complete. A round is complete when all its
// exchanges are. A rank seals for, and takes headers of, the first round that is not complete and the round
// after it. So no header stays at the head of a link before one that is needed earlier, and two halves of
// memory are enough.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

#include "collective/rounds.hpp"
#include "device/device.hpp"
#include "keys/keys.hpp"
#include "record/record.hpp"

namespace sealring {

// A record that was announced by its header, and is opened when its exchange is complete.
struct Announced {
  uint64_t round;
  uint64_t segment;
  int step;
  int peer;
  Header header;
  OpeningKey* key;
  int key_slot;
  uint8_t* at;
};

class Exchanging {
 public:
  Exchanging(const Cut& cut, const Wires& wires);

  uint64_t round_of(uint64_t segment, int step) const { return rounds_.of(segment, step); }
  // Whether records of this round may be sealed, and their headers taken.
  bool reachable(uint64_t round) const { return round <= current_ + 1; }
  uint8_t* place_to_seal(uint64_t segment, int step);
  void sealed(uint64_t round, const std::vector<int>& peers);
  // False if this record was announced before.
  [[nodiscard]] bool announce(Announced record);
  // Whether a record under this key was announced and is not opened yet.
  bool awaits(const OpeningKey& key) const;
  // Records whose exchange is complete. Collective::open_arrived() removes each one that it opens.
  std::vector<Announced>& arrived() { return arrived_; }
  void opened(uint64_t round) { --find(round).unopened; }

  // Begins exchanges and looks for completed ones; true if anything moved.
  bool advance(Device& device);
  bool complete() const { return live_.empty() && next_ == rounds_.count(); }
  bool under_way() const;
  // The peers of the oldest exchanges under way.
  std::vector<int> awaited_peers() const;

 private:
  // One exchange of a round, and how far it is.
  struct Part {
    Exchange exchange;
    size_t unsealed, unannounced;
    bool begun = false, complete = false;
    std::vector<Announced> announced = {};
    bool under_way() const { return begun && !complete; }
  };
  struct Live {
    uint64_t number;
    Round round;
    std::vector<Part> parts;
    size_t unopened;
    std::vector<bool> seen;  // by receive: whether its header has come
    bool complete() const;
    Part* on(size_t channel);
  };
  void refill();
  Live& find(uint64_t round);
  bool may_begin(const Live& live, const Part& part) const;
  bool begin(size_t channel, Device& device);
  bool end(size_t channel, Device& device);

  const int rank_;
  const Channels& channels_;
  const Rounds rounds_;
  std::deque<Live> live_;
  uint64_t next_ = 0;  // the first round that is not among `live_` yet
  uint64_t current_ = 0;  // the first round that is not complete
  std::vector<uint64_t> ended_;  // by channel: how many exchanges have ended
  std::vector<Announced> arrived_;
};

}  // namespace sealring
