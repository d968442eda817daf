// The further lanes of a group: pipes beside the first one of each pair, each with its own keys, buffers and
// thread, so that several cores share a large collective.
//
// A lane has its own window, links and counts, and shares nothing with another one but the memory of the
// tensors, of which each has its own segments. So what holds for one lane (no deadlock, no nonce twice, no
// record out of sequence) holds for all of them, and a group without further lanes is one with a single lane.
#pragma once

#include <memory>
#include <vector>

#include "collective/collective.hpp"

namespace sealring {

struct Lane {
  // `first` is the keyring of the group's first lane. All members have a key in this lane: what one publishes
  // comes over other members' links too.
  Lane(const Keyring& first, size_t number, size_t payload_bytes, uint64_t rekey_bytes);

  // The pipe to `first.peer` in this lane, under keys of its own.
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
