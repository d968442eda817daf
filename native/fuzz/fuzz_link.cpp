// One link reads a script: everything that it hands on was sealed by a member, unchanged and in order.
#include "transport/link.hpp"

#include "script.hpp"

using namespace sealring;
using namespace sealring::fuzz;

namespace {

constexpr int kRank = 0, kPeer = 1, kWorld = 3;

void run(std::span<const uint8_t> script) {
  if (script.empty()) return;
  const uint8_t settings = script[0];
  Sealer sealer(kRank, kWorld);
  auto pipe = std::make_unique<ScriptedPipe>();
  std::vector<Sent> sent;
  for (const Line& line : lines_of(script.subspan(1))) {
    sent.push_back(sealer.seal(line, kPeer));
    pipe->add(sent.back());
  }
  BufferPool pool(settings & 1 ? 1024 : kMaxScriptPayload), gpu_pool(2048);
  Keyring keyring{
      kRank, Context{}, std::make_unique<SealingKey>(testing::group_key(kRank), 1u << 30), {}};
  keyring.groups.resize(kWorld);
  for (int rank = 1; rank < kWorld; ++rank) {
    keyring.groups[rank] = std::make_unique<OpeningKey>(testing::group_key(rank));
  }
  if (settings & 2) {
    keyring.gpu_pool = &gpu_pool;
    keyring.wire_slots = settings & 4 ? 5 : 0;
    keyring.groups_gpu.resize(kWorld);
    for (int rank = 1; rank < kWorld; ++rank) {
      keyring.groups_gpu[rank] =
          std::make_unique<OpeningKey>(gpu_key(testing::group_key(rank)), Suite::chacha20_poly1305);
    }
  }
  Link link(kPeer, std::move(pipe), testing::pair_key(kRank, kPeer),
            testing::pair_key(kPeer, kRank), 1u << 30, keyring, pool);
  link.expecting = !(settings & 8);
  link.only_listening = settings & 16;
  for (const Sent& next : sent) {
    while (!link.ready() && link.fill()) {
    }
    if (!link.ready()) return;  // a published record that this rank does not expect yet
    const Header& header = link.header();
    // The header's tag was right. A changed payload is noticed below, when it is opened.
    require(next.in_order || link.only_listening);
    require(header.kind == next.header.kind && header.length == next.header.length);
    require(header.kind == Kind::group || header.sender == kPeer);
    const bool elsewhere = header.lane >= kWireLane;  // its payload does not come over the link
    if (!elsewhere && !link.only_listening) {
      link.open(link.arrived_payload());
      require(next.authentic);
      require(std::equal(next.plain.begin(), next.plain.end(), link.arrived_payload()));
    }
    link.take();
    if (elsewhere) return;  // the script's payload follows, which no peer sends
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    run({data, size});
  } catch (const Failure& failure) {
    require(failure.peer >= 0);
  }
  return 0;
}
