// A rank in a group of three reduces, forwards and opens what scripts send it as its two peers.
#include "collective/engine.hpp"
#include "script.hpp"
#include "stand_ins/host_device.hpp"
#include "tests/programs.hpp"

using namespace sealring;
using namespace sealring::fuzz;

namespace {

constexpr int kRank = 0, kWorld = 3;
constexpr size_t kChunk = 2000, kSegment = 1024;
constexpr uint8_t kOwn = 1;

// How many slots each peer's area has, for records whose payload does not come over the link.
constexpr uint32_t kSlots = 6;

// A peer's area. Made once, because it is large; clear() clears what a run may have written.
struct Area {
  std::vector<uint8_t> bytes = std::vector<uint8_t>(Wires::area_bytes(kSlots, kGpuPayload));
  uint8_t* slot(uint32_t number) { return bytes.data() + number * run_stride(kGpuPayload); }
  void clear() {
    for (uint32_t number = 0; number < kSlots; ++number) {
      std::fill_n(slot(number), kMaxScriptPayload + kRecordOverhead, uint8_t{0});
    }
  }
};

std::array<Area, kWorld>& areas() {
  static std::array<Area, kWorld> made;
  return made;
}

struct Group {
  Group(std::span<const uint8_t> script, bool wired, bool on_device)
      : engine(kRank, kWorld, Context{}, testing::group_key(kRank), kSegment, 1u << 30) {
    Sealer sealer(kRank, kWorld);
    std::array<std::unique_ptr<ScriptedPipe>, kWorld> pipes;
    for (int peer = 1; peer < kWorld; ++peer) pipes[peer] = std::make_unique<ScriptedPipe>();
    for (Area& area : areas()) {
      if (wired) area.clear();
    }
    for (const Line& line : lines_of(script)) {
      const int peer = 1 + line.bytes[kPeerAt] % (kWorld - 1);
      Sent sent = sealer.seal(line, peer);
      if (sent.authentic) fills.push_back(line.fill());
      if (wired && sent.header.lane >= kWireLane && sent.bytes.size() > kSealedHeaderBytes) {
        const uint32_t slot = sent.header.lane - kWireLane;
        if (slot < kSlots)
          std::copy(sent.bytes.begin(), sent.bytes.end(), areas()[peer].slot(slot));
        sent.bytes.resize(kSealedHeaderBytes);
      }
      pipes[peer]->add(sent);
    }
    for (int peer = 1; peer < kWorld; ++peer) {
      engine.add_link(peer, std::move(pipes[peer]), testing::pair_key(kRank, peer),
                      testing::pair_key(peer, kRank), testing::group_key(peer));
    }
    if (on_device) engine.attach(std::make_unique<HostDevice>(1, kWorld));
    if (!wired) return;
    engine.offer_wires(kSlots, kGpuPayload,
                       [](size_t) { return Device::Area{areas()[kRank].slot(0)}; });
    for (int peer = 1; peer < kWorld; ++peer) engine.open_wire(peer, {areas()[peer].slot(0)});
    engine.use_wires();
  }

  std::vector<uint8_t> fills;
  Engine engine;
};

void run(std::span<const uint8_t> script) {
  if (script.empty()) return;
  const bool on_device = script[0] & 1, wired = (script[0] & 3) == 3;
  const bool broadcasts = script[0] & 4;
  Group group(script.subspan(1), wired, on_device);
  // Made once: a program does not change.
  static const Program reduces = testing::ring_all_reduce(kWorld, kRank);
  static const Program receives = testing::receive_from(1, kWorld, kRank);
  static const Program sums = testing::direct_sum(kWorld, kRank);
  const Program& program = broadcasts ? receives : wired ? sums : reduces;
  std::vector<uint8_t> tensor(kChunk * static_cast<size_t>(program.slots), kOwn);
  std::vector<Slot> slots;
  for (int slot = 0; slot < program.slots; ++slot)
    slots.push_back({tensor.data() + kChunk * static_cast<size_t>(slot), kChunk});
  Call call{&program, slots, 1, tensor.size(), 0, DType::uint8, ReduceKind::sum, 1.0, kSegment, 0};
  call.on_device = on_device;
  call.wired = wired;
  try {
    group.engine.run(call);
  } catch (const Failure&) {
  }
  // Each byte must be ours, an authentic record's, or a sum of both kinds.
  std::array<bool, 256> allowed{};
  allowed[kOwn] = true;
  for (const uint8_t fill : group.fills) {
    allowed[fill] = allowed[static_cast<uint8_t>(kOwn + fill)] = true;
    for (const uint8_t other : group.fills)
      allowed[static_cast<uint8_t>(kOwn + fill + other)] = true;
  }
  for (const uint8_t byte : tensor) require(allowed[byte]);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  run({data, size});
  return 0;
}
