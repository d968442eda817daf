// Two mailboxes that are linked with each other.
#pragma once

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "mailbox/mailbox.hpp"
#include "stand_ins/host_device.hpp"
#include "two_ends.hpp"

namespace sealring::testing {

struct Post {
  explicit Post(SharedMemory* memory, size_t record_bytes = 4096, uint64_t rekey_bytes = 1u << 30)
      : sockets(tcp_pair()),
        zero(0, 2, Context{}, record_bytes, rekey_bytes),
        one(1, 2, Context{}, record_bytes, rekey_bytes) {
    zero.add_link(1, TwoEnds::pipe(sockets.first, memory, 0), pair_key(0, 1), pair_key(1, 0));
    one.add_link(0, TwoEnds::pipe(sockets.second, memory, 1), pair_key(1, 0), pair_key(0, 1));
  }
  void attach(int lag_of_zero, int lag_of_one) {
    zero.attach(std::make_unique<HostDevice>(lag_of_zero, 2));
    one.attach(std::make_unique<HostDevice>(lag_of_one, 2));
  }
  std::pair<int, int> sockets;
  Mailbox zero;
  Mailbox one;
};

using CompletionRef = std::shared_ptr<Completion>;

inline CompletionRef send(Mailbox& box, int peer, uint32_t tag, const uint8_t* from, size_t bytes,
                          double timeout_s,
                          const std::optional<CallerStream>& caller = std::nullopt) {
  return box.submit({true, peer, tag, const_cast<uint8_t*>(from), bytes, timeout_s}, caller);
}

inline CompletionRef receive(Mailbox& box, int peer, uint32_t tag, uint8_t* into, size_t bytes,
                             double timeout_s,
                             const std::optional<CallerStream>& caller = std::nullopt) {
  return box.submit({false, peer, tag, into, bytes, timeout_s}, caller);
}

// Returns the rank at the other end.
inline int wait_for(const CompletionRef& message) {
  message->wait_on_host({});
  return message->peer();
}

inline std::vector<uint8_t> bytes_of(size_t size, uint8_t seed) {
  std::vector<uint8_t> out(size);
  for (size_t i = 0; i < size; ++i) out[i] = static_cast<uint8_t>(seed + i * 7);
  return out;
}

template <typename Test>
void over_both(Test test) {
  {
    Post tcp(nullptr);
    test(tcp);
  }
  SharedMemory memory;
  Post shm(&memory);
  test(shm);
}

}  // namespace sealring::testing
