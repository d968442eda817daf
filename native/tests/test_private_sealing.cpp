// No AEAD reads or writes memory that others can write: while a record is being sealed, nothing of it is in
// shared memory, and what others write there meanwhile changes no tag.

#include <algorithm>
#include <thread>

#include "check.hpp"
#include "collective/engine.hpp"
#include "interrupted_seal.hpp"
#include "post.hpp"
#include "stand_ins/gpu_arithmetic.hpp"
#include "two_ends.hpp"

using namespace sealring;
using namespace sealring::testing;

namespace {

constexpr size_t kText = 32u << 10;
constexpr uint8_t kUntouched = 0xab;

// Watches the ring of a link's end 0: whether it was untouched in the middle of sealing.
struct Watch {
  Watch() { std::memset(memory.data(0), kUntouched, kRing); }
  // `sent` bytes of the ring were written before.
  void look(size_t sent = 0) {
    const uint8_t* const ring = memory.data(0);
    untouched =
        std::all_of(ring + sent, ring + kRing, [](uint8_t each) { return each == kUntouched; });
  }
  SharedMemory memory;
  bool untouched = false;
};

void check_opens(End& end, const InterruptedPlaintext& text) {
  CHECK(end.open() == std::vector<uint8_t>(text.data(), text.data() + text.size()));
}

}  // namespace

// threat: R6
TEST(link_seals_in_private_memory) {
  Watch watch;
  const auto [near, far] = tcp_pair();
  End zero(0, watch.memory.pipe(near, 0), 1u << 30, kText),
      one(1, watch.memory.pipe(far, 1), 1u << 30, kText);
  const InterruptedPlaintext text(kText, [&] { watch.look(); });
  Header header;
  header.length = kText;
  zero.link.send(header, text.data());
  CHECK(text.was_interrupted());
  CHECK(watch.untouched);
  zero.link.flush();
  one.receive();
  check_opens(one, text);
}

// A collective's records: sent to one peer, published for one, and published for several.
// threat: R6
TEST(collective_seals_in_private_memory) {
  struct Way {
    Action action;
    std::vector<int> peers;
  };
  for (const Way& way :
       {Way{Action::send, {1}}, Way{Action::publish, {1}}, Way{Action::publish, {1, 2}}}) {
    Watch first, second;
    const int world = static_cast<int>(way.peers.size()) + 1;
    const InterruptedPlaintext text(kText, [&] { first.look(), second.look(); });
    Engine engine(0, world, Context{}, group_key(0), kText, 1u << 30);
    std::vector<std::unique_ptr<End>> receivers;
    for (int peer : way.peers) {
      const auto [near, far] = tcp_pair();
      SharedMemory& memory = (peer == 1 ? first : second).memory;
      engine.add_link(peer, memory.pipe(near, 0), pair_key(0, peer), pair_key(peer, 0),
                      group_key(peer));
      // The receiving End is rank 1 of a pair; it also opens what rank 0 published.
      receivers.push_back(std::make_unique<End>(1, memory.pipe(far, 1), 1u << 30, kText));
    }
    const Program program(4, 2, 0, world, 1, {}, {{way.action, 0, way.peers, 0, -1, -1, {}}});
    engine.run({&program,
                {{text.data(), text.size()}},
                1,
                text.size(),
                0,
                DType::uint8,
                ReduceKind::none,
                1.0,
                kText,
                20});
    CHECK(text.was_interrupted());
    CHECK(first.untouched && second.untouched);
    for (const auto& receiver : receivers) {
      receiver->receive();
      check_opens(*receiver, text);
    }
  }
}

// A message that travels with its announcement, and one that is first announced by a record without payload.
// threat: R6
TEST(mailbox_seals_in_private_memory) {
  constexpr size_t kLong = Mailbox::kShortBytes + (8u << 10);
  for (const auto& [bytes, announced] :
       {std::pair{Mailbox::kShortBytes, size_t{0}}, {kLong, kRecordOverhead}}) {
    Watch watch;
    Post post(&watch.memory, kLong);
    const InterruptedPlaintext text(bytes, [&, announced = announced] { watch.look(announced); });
    std::vector<uint8_t> got(bytes);
    std::thread receiver(
        [&, bytes = bytes] { wait_for(receive(post.one, 0, 9, got.data(), bytes, 20)); });
    wait_for(send(post.zero, 1, 9, text.data(), bytes, 20));
    receiver.join();
    CHECK(text.was_interrupted());
    CHECK(watch.untouched);
    CHECK(std::memcmp(got.data(), text.data(), bytes) == 0);
  }
}

// A GPU may build a sealed record in memory that others can write, because it never reads it back. Here the
// CPU computes what the GPU does, and everything written so far is changed meanwhile.
// threat: C12
TEST(tag_of_the_gpus_arithmetic_does_not_depend_on_its_output) {
  const KeyBytes key = pair_key(0, 1);
  const Nonce nonce = make_nonce(1, 7);
  const std::array<uint8_t, 96> associated{};
  std::vector<uint8_t> cipher(kText, 0), expected(kText);
  std::array<uint8_t, kTagBytes> tag, expected_tag;
  const InterruptedPlaintext text(kText, [&] {
    for (uint8_t& each : cipher) each ^= 1;
  });
  gpu_seal(key, nonce, associated, text.data(), text.size(), cipher.data(), tag.data());
  CHECK(text.was_interrupted());
  gpu_seal(key, nonce, associated, text.data(), text.size(), expected.data(), expected_tag.data());
  CHECK(tag == expected_tag);
}

int main(int argc, char** argv) { return run(argc, argv); }
