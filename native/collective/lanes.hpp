// The further lanes of a group: pipes beside the first one of each pair, each with its own keys, buffers and
// thread, so that several cores share a large collective.
//
// A lane has its own window, links and counts. Lanes share only the memory of the tensors, of which each lane
// has its own segments. So what holds for one lane (no deadlock, no nonce twice, no record out of sequence)
// holds for all of them, and a group without further lanes is a group with one lane.
#pragma once

#include <memory>
#include <vector>

#include "collective/collective.hpp"

namespace sealring {

struct Lane {
  // `first` is the keyring of the group's first lane. Every member gets a group key for this lane, because
  // the records that a member publishes also come over other members' links.
  Lane(const Keyring& first, size_t number, size_t payload_bytes, uint64_t rekey_bytes);

  // Adds the pipe to `first.peer`, with this lane's own keys.
  void add(const Link& first, std::unique_ptr<Pipe> pipe, uint64_t rekey_bytes);
  // Closes the pipes; the keys' destructors overwrite them.
  void wipe();
  size_t memory_bytes() const;

  BufferPool pool;
  Keyring keyring;
  Links links;
  Stats stats;
  Backoff backoff;
  LateLinks no_late_links;  // a lane has all its links before it is used
};

Stats operator+(const Stats& one, const Stats& other);

}  // namespace sealring
