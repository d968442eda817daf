// Links over both kinds of pipe, and attacks by the owner of shared memory.

#include <algorithm>
#include <functional>
#include <random>

#include "check.hpp"
#include "two_ends.hpp"

using namespace sealring;
using namespace sealring::testing;

namespace {

std::vector<uint8_t> pattern(size_t bytes) {
  std::vector<uint8_t> out(bytes);
  for (size_t i = 0; i < bytes; ++i) out[i] = static_cast<uint8_t>("PLAINTEXT"[i % 9]);
  return out;
}

void check_fails(FailureCode code, const std::function<void()>& action, int about) {
  try {
    action();
  } catch (const Failure& failure) {
    CHECK_NOTE(failure.code == code, "code %d: %s", static_cast<int>(failure.code), failure.what());
    CHECK(failure.peer == about);
    return;
  }
  CHECK(false && "did not fail");
}

void over_both(const std::function<void(TwoEnds&)>& body, uint64_t rekey_bytes = 1u << 30) {
  TwoEnds tcp(nullptr, rekey_bytes);
  body(tcp);
  SharedMemory memory;
  TwoEnds shm(&memory, rekey_bytes);
  body(shm);
}

}  // namespace

TEST(records_arrive_in_order_and_whole) {
  over_both([](TwoEnds& ends) {
    for (size_t bytes : {0, 1, 15, 16, 17, 1000, 4096}) {
      for (Kind kind : {Kind::pair, Kind::group}) {
        ends.zero.enqueue(pattern(bytes), kind);
        ends.one.enqueue(pattern(bytes + 0), kind);
        while (!ends.zero.link.idle()) ends.zero.link.flush();
        while (!ends.one.link.idle()) ends.one.link.flush();
        ends.one.receive();
        CHECK(ends.one.link.header().kind == kind);
        CHECK(ends.one.open() == pattern(bytes));
        ends.zero.receive();
        CHECK(ends.zero.open() == pattern(bytes));
      }
    }
  });
}

// Sends more than the pipe holds, so that both ends stop and go on in the middle of records.
TEST(stream_longer_than_the_pipe_goes_through) {
  over_both(
      [](TwoEnds& ends) {
        std::mt19937 random(7);
        size_t sent = 0, received = 0;
        const size_t all = 400;
        const auto bytes_of = [](size_t i) { return (i * 977) % 4097; };
        while (received < all) {
          if (sent < all && ends.zero.link.has_room() && random() % 2 == 0) {
            ends.zero.enqueue(pattern(bytes_of(sent++)), random() % 2 ? Kind::pair : Kind::group);
          }
          if (random() % 3 != 0) ends.zero.link.flush();
          ends.one.link.fill();
          if (ends.one.link.ready()) {
            CHECK(ends.one.open() == pattern(bytes_of(received++)));
          }
        }
      },
      10'000);
}

// ---- read once ---------------------------------------------------------------------------------

// The record is checked and used from a private copy: changing the shared memory after it was read has no
// effect.
// threat: R5
TEST(whole_record_is_private_before_it_is_opened) {
  for (Kind kind : {Kind::pair, Kind::group}) {
    SharedMemory memory;
    TwoEnds ends(&memory);
    ends.zero.enqueue(pattern(4000), kind);
    ends.zero.link.flush();
    ends.one.receive();
    CHECK(ends.one.link.ready());
    memory.scribble(0xee);
    CHECK(ends.one.open() == pattern(4000));
  }
}

// The header is checked, and the payload's length taken, from the same private copy.
// threat: R5
TEST(header_is_private_before_it_is_checked) {
  SharedMemory memory;
  TwoEnds ends(&memory);
  ends.zero.enqueue(pattern(4000));
  ends.zero.link.flush();
  // Let the reader see only the sealed header at first.
  const uint64_t all = kRecordOverhead + 4000;
  memory.set_word(0, SharedMemory::kWritten, kSealedHeaderBytes);
  ends.one.link.fill();
  CHECK(!ends.one.link.ready());
  std::memset(memory.data(0), 0xee, kSealedHeaderBytes);
  memory.set_word(0, SharedMemory::kWritten, all);
  ends.one.receive();
  CHECK(ends.one.open() == pattern(4000));
}

// The payload is changed after its first half was read. The other half is read changed, and the tag check
// fails.
// threat: R5, R8
TEST(bytes_changed_before_they_are_read_do_not_open) {
  SharedMemory memory;
  TwoEnds ends(&memory);
  ends.zero.enqueue(pattern(4000));
  ends.zero.link.flush();
  memory.set_word(0, SharedMemory::kWritten, 2000);
  ends.one.link.fill();
  memory.data(0)[3000] ^= 1;
  memory.set_word(0, SharedMemory::kWritten, kRecordOverhead + 4000);
  ends.one.receive();
  check_fails(FailureCode::tampered, [&] { ends.one.open(); }, 0);
}

// A record is sealed in private memory and copied out by flush(); test_private_sealing.cpp watches this while
// it happens.
// threat: R8
TEST(nothing_reaches_shared_memory_before_it_is_sealed) {
  SharedMemory memory;
  TwoEnds ends(&memory);
  std::memset(memory.data(0), 0xab, kRing);
  ends.zero.enqueue(pattern(4000));
  ends.zero.enqueue(pattern(4000), Kind::group);
  CHECK(std::all_of(memory.data(0), memory.data(0) + kRing,
                    [](uint8_t byte) { return byte == 0xab; }));
  ends.zero.link.flush();
  const uint8_t* from = memory.data(0);
  const size_t sent = 2 * (kRecordOverhead + 4000);
  CHECK(std::all_of(from + sent, from + kRing, [](uint8_t byte) { return byte == 0xab; }));
  const std::vector<uint8_t> word = pattern(9);
  CHECK(std::search(from, from + kRing, word.begin(), word.end()) == from + kRing);
  for (int i = 0; i < 2; ++i) {
    ends.one.receive();
    CHECK(ends.one.open() == pattern(4000));
  }
}

// A link queues a few records ahead of the pipe, and no more.
TEST(records_that_wait_for_the_pipe_are_few) {
  over_both([](TwoEnds& ends) {
    size_t waiting = 0;
    for (; ends.zero.link.has_room(); ++waiting) ends.zero.enqueue(pattern(100));
    CHECK(waiting > 1);
    CHECK(waiting < 16);
    ends.zero.link.flush();
    CHECK(ends.zero.link.has_room());
  });
}

// ---- control words -----------------------------------------------------------------------------

TEST(impossible_positions_are_seen_wherever_they_are_read) {
  const uint64_t absurd[] = {kRing + 1, 1ull << 40, ~0ull, 1ull << 63};
  for (uint64_t value : absurd) {
    {
      SharedMemory memory;
      TwoEnds ends(&memory);
      memory.set_word(0, SharedMemory::kWritten, value);
      check_fails(FailureCode::tampered, [&] { ends.one.link.fill(); }, 0);
    }
    {
      SharedMemory memory;
      TwoEnds ends(&memory);
      memory.set_word(0, SharedMemory::kWritten, value);
      check_fails(FailureCode::tampered, [&] { ends.one.link.arm(); }, 0);
    }
    {
      SharedMemory memory;
      TwoEnds ends(&memory);
      memory.set_word(1, SharedMemory::kTaken, value);
      ends.zero.enqueue(pattern(10));
      check_fails(FailureCode::tampered, [&] { ends.zero.link.flush(); }, 1);
    }
    {
      SharedMemory memory;
      TwoEnds ends(&memory);
      memory.set_word(1, SharedMemory::kTaken, value);
      ends.zero.enqueue(pattern(10));
      check_fails(FailureCode::tampered, [&] { ends.zero.link.arm(); }, 1);
    }
  }
}

// threat: R2
TEST(position_that_goes_back_is_seen) {
  SharedMemory memory;
  TwoEnds ends(&memory);
  ends.zero.enqueue(pattern(100));
  ends.zero.link.flush();
  ends.one.receive();
  ends.one.open();
  memory.set_word(0, SharedMemory::kWritten, 10);
  check_fails(FailureCode::tampered, [&] { ends.one.link.fill(); }, 0);
}

// ---- sequence ----------------------------------------------------------------------------------

// threat: R4
TEST(old_record_put_back_is_a_replay) {
  SharedMemory memory;
  TwoEnds ends(&memory);
  ends.zero.enqueue(pattern(100));
  ends.zero.link.flush();
  ends.one.receive();
  ends.one.open();
  const size_t size = kRecordOverhead + 100;
  std::memcpy(memory.data(0) + size, memory.data(0), size);
  memory.set_word(0, SharedMemory::kWritten, 2 * size);
  check_fails(FailureCode::replayed, [&] { ends.one.receive(); }, 0);
}

// threat: W5
TEST(record_left_out_is_missed) {
  SharedMemory memory;
  TwoEnds ends(&memory);
  for (int i = 0; i < 2; ++i) ends.zero.enqueue(pattern(100));
  ends.zero.link.flush();
  const size_t size = kRecordOverhead + 100;
  std::memcpy(memory.data(0), memory.data(0) + size, size);
  memory.set_word(0, SharedMemory::kWritten, size);
  check_fails(FailureCode::missing, [&] { ends.one.receive(); }, 0);
}

// threat: W8
TEST(record_sent_back_to_its_sealer_is_refused) {
  for (Kind kind : {Kind::pair, Kind::group}) {
    SharedMemory memory;
    TwoEnds ends(&memory);
    ends.zero.enqueue(pattern(100), kind);
    ends.zero.link.flush();
    const size_t size = kRecordOverhead + 100;
    std::memcpy(memory.data(1), memory.data(0), size);
    memory.set_word(1, SharedMemory::kWritten, size);
    check_fails(FailureCode::tampered, [&] { ends.zero.receive(); }, 1);
  }
}

// Even under the right key, a record is refused unless it is addressed to us over this link.
TEST(record_addressed_to_another_link_is_refused) {
  struct Address {
    Kind kind;
    uint32_t sender, receiver, lane;
    bool good;
  };
  const Address addresses[] = {
      {Kind::pair, 0, 1, 0, true},           {Kind::pair, 0, 2, 0, false},
      {Kind::pair, 2, 1, 0, false},          {Kind::pair, 0, kEveryone, 0, false},
      {Kind::pair, 0, 1, 1, false},          {Kind::alert, 0, 0, 0, false},
      {Kind::bye, 1, 1, 0, false},           {Kind::group, 0, kEveryone, 0, true},
      {Kind::group, 0, 1, 0, false},         {Kind::group, 1, kEveryone, 0, false},
      {Kind::group, 9, kEveryone, 0, false}, {Kind::group, 0, kEveryone, 1, false},
  };
  for (const Address& address : addresses) {
    TwoEnds ends;
    SealingKey key(address.kind == Kind::group ? group_key(0) : pair_key(0, 1), 1u << 30);
    Header header;
    header.kind = address.kind;
    header.sender = address.sender;
    header.receiver = address.receiver;
    header.lane = address.lane;
    header.length = 9;
    std::vector<uint8_t> record(kRecordOverhead + 9);
    seal_record(key, Context{}, header, pattern(9).data(), record.data());
    good(static_cast<int>(::send(ends.sockets.first, record.data(), record.size(), 0)), "send");
    if (address.good) {
      ends.one.receive();
      CHECK(ends.one.open() == pattern(9));
    } else {
      check_fails(FailureCode::tampered, [&] { ends.one.receive(); }, 0);
    }
  }
}

// A published record's header is not checked while the collective takes none from this link, because its
// sealer's earlier records may still come over another link. Other kinds of records are checked.
TEST(published_record_waits_until_it_is_expected) {
  over_both([](TwoEnds& ends) {
    ends.one.link.expecting = false;
    ends.zero.enqueue(pattern(10));
    ends.zero.enqueue(pattern(20), Kind::group);
    ends.zero.link.flush();
    ends.one.receive();
    CHECK(ends.one.open() == pattern(10));
    for (int i = 0; i < 100; ++i) ends.one.link.fill();
    CHECK(!ends.one.link.ready());
    CHECK(!ends.one.link.wants_read());
    ends.one.link.expecting = true;
    ends.one.receive();
    CHECK(ends.one.open() == pattern(20));
  });
}

// ---- ends --------------------------------------------------------------------------------------

// threat: W9
TEST(end_within_a_record_names_the_peer) {
  TwoEnds ends;
  Header header;
  header.length = 100;
  std::vector<uint8_t> record(kRecordOverhead + 100);
  ends.zero.link.seal(header, pattern(100).data(), record.data());
  // Sends the header and half of the payload straight into the socket.
  good(static_cast<int>(::send(ends.sockets.first, record.data(), 120, 0)), "send");
  ::shutdown(ends.sockets.first, SHUT_WR);
  check_fails(FailureCode::peer_lost, [&] { ends.one.receive(); }, 0);
}

// The wake-up socket is cut while both ends live: the ring is full and ends with half a record, and later
// there is room again for a last record. It must not be taken for the record's other half.
TEST(nothing_follows_half_a_record) {
  SharedMemory memory;
  TwoEnds ends(&memory);
  constexpr size_t kLong = 4096;
  constexpr size_t kWhole = kRing / (kLong + kRecordOverhead);
  for (size_t i = 0; i < kWhole + 1; ++i) ends.zero.enqueue(pattern(kLong));
  ends.zero.link.flush();
  CHECK(!ends.zero.link.idle());
  ::shutdown(ends.zero.link.socket(), SHUT_RDWR);
  ends.zero.link.disarm();  // notices that the socket was shut down
  ends.zero.link.flush();
  CHECK(ends.zero.link.broken());
  for (size_t i = 0; i < kWhole; ++i) {
    ends.one.receive();
    ends.one.open();
  }
  ends.one.link.fill();  // takes the half record, and makes room
  ends.zero.enqueue(pattern(kLong), Kind::alert);
  ends.zero.link.flush();
  ends.one.link.disarm();
  check_fails(FailureCode::peer_lost, [&] { ends.one.receive(); }, 0);
}

TEST(end_after_a_goodbye_is_in_order) {
  TwoEnds ends;
  ends.zero.enqueue({}, Kind::bye);
  ends.zero.link.flush();
  ends.zero.link.end_writing();
  ends.one.receive();
  CHECK(ends.one.link.header().kind == Kind::bye);
  ends.one.open();
  ends.one.link.said_bye = true;
  while (!ends.one.link.ended()) ends.one.link.fill();
  CHECK(!ends.one.link.ready());
}

int main(int argc, char** argv) { return run(argc, argv); }
