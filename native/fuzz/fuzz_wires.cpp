// The lending of an area's slots: a peer that lies about what it has fetched frees no slot too early.
#include "device/wires.hpp"

#include <set>

#include "script.hpp"

using namespace sealring;
using namespace sealring::fuzz;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  constexpr int kWorld = 4;
  constexpr uint32_t kSlots = 5;
  Wires wires(kWorld, kSlots, kGpuPayload);
  std::array<std::deque<uint32_t>, kWorld> lent;  // by peer, in order: the expected loans
  std::array<uint64_t, kWorld> returned{};
  std::array<int, kSlots> readers{};
  for (size_t at = 0; at + 4 <= size; at += 4) {
    const int peer = data[at + 1] % kWorld;
    if (data[at] & 1) {
      if (!wires.has_room()) continue;
      std::vector<int> peers;
      for (int each = 0; each < kWorld; ++each) {
        if (data[at + 2] >> each & 1) peers.push_back(each);
      }
      if (peers.empty()) continue;
      const uint32_t slot = wires.lend(peers);
      require(slot < kSlots && readers[slot] == 0);
      readers[slot] = static_cast<int>(peers.size());
      for (int each : peers) lent[each].push_back(slot);
    } else {
      const uint64_t ever = data[at] & 2 ? returned[peer] + data[at + 2] % 8
                                         : uint64_t{data[at + 2]} << (data[at + 3] % 57);
      const bool possible = ever > returned[peer] && ever - returned[peer] <= lent[peer].size();
      require(wires.returned(peer, ever) == possible);
      if (!possible) continue;
      for (; returned[peer] != ever; ++returned[peer]) {
        --readers[lent[peer].front()];
        lent[peer].pop_front();
      }
    }
    bool any = false;
    for (const int count : readers) any |= count != 0;
    require(wires.lends() == any);
    for (int each = 0; each < kWorld; ++each) require(wires.lent_to(each) == !lent[each].empty());
  }
  return 0;
}
