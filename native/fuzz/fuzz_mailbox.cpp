// A mailbox sends and receives messages while its peers follow a script.
#include "mailbox/mailbox.hpp"

#include "script.hpp"
#include "stand_ins/host_device.hpp"

using namespace sealring;
using namespace sealring::fuzz;

namespace {

constexpr int kRank = 0, kWorld = 3;
constexpr size_t kMessages = 6;
constexpr uint8_t kUntouched = 0xee;

void run(std::span<const uint8_t> script) {
  if (script.size() < 2 + kMessages) return;
  const bool on_device = script[0] & 1;
  Sealer sealer(kRank, kWorld);
  std::array<std::unique_ptr<ScriptedPipe>, kWorld> pipes;
  for (int peer = 1; peer < kWorld; ++peer) pipes[peer] = std::make_unique<ScriptedPipe>();
  std::array<bool, 256> allowed{};
  allowed[kUntouched] = true;
  for (const Line& line : lines_of(script.subspan(2 + kMessages))) {
    const int peer = 1 + line.bytes[kPeerAt] % (kWorld - 1);
    const Sent sent = sealer.seal(line, peer);
    if (sent.authentic) allowed[line.fill()] = true;
    pipes[peer]->add(sent);
  }
  std::vector<std::vector<uint8_t>> memory;
  Mailbox mailbox(kRank, kWorld, Context{}, 1024, 1u << 30, 2048);
  for (int peer = 1; peer < kWorld; ++peer) {
    mailbox.add_link(peer, std::move(pipes[peer]), testing::pair_key(kRank, peer),
                     testing::pair_key(peer, kRank));
  }
  if (on_device) mailbox.attach(std::make_unique<HostDevice>(script[0] >> 4, kWorld));
  try {
    std::vector<std::shared_ptr<Completion>> submitted;
    for (size_t i = 0; i < kMessages; ++i) {
      const uint8_t what = script[2 + i];
      if (what == 0) continue;
      const size_t bytes = (what >> 5) * 700u + (what & 3);
      memory.emplace_back(bytes, kUntouched);
      const auto caller = on_device && (what & 4) ? std::optional(CallerStream{}) : std::nullopt;
      const uint32_t tag = what & 3;
      const int peer = 1 + (what >> 3 & 1);
      const bool sends = what & 16, from_anyone = !sends && script[1] >> i & 1;
      submitted.push_back(mailbox.submit(
          {sends, from_anyone ? Message::kAnyone : peer, tag, memory.back().data(), bytes, 0},
          caller));
    }
    for (const auto& message : submitted) message->wait_on_host({});
  } catch (const Failure&) {
  }
  mailbox.close();
  for (const auto& each : memory) {
    for (const uint8_t byte : each) require(allowed[byte]);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  run({data, size});
  return 0;
}
