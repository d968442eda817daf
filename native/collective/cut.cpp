// How a call's slots are cut into segments.
#include <algorithm>

#include "collective/collective.hpp"

namespace sealring {
namespace {

// The window on a device. Latencies are longer there, and no cache limits the window.
constexpr uint64_t kDeviceWindow = 16;

bool writes(Action action) {
  return action != Action::send && action != Action::publish && action != Action::forward;
}

}  // namespace

Cut::Cut(const Call& call, const Wires* wires)
    : call(call),
      program(*call.program),
      segment_bytes(call.segment_bytes),
      segments(call.lane == 0 ? 1 : 0) {
  full_segments = program.steps.empty() ? 1 : UINT64_MAX;
  for (size_t step = 0; step < program.steps.size(); ++step) {
    const uint64_t count = segments_of(static_cast<int>(step));
    segments = std::max(segments, count);
    full_segments = std::min(full_segments, count);
    steps += count;
  }
  // The window follows from the world's size, not from this rank's steps. Otherwise a rank whose window is
  // smaller than its peer's could find a record at the head of a link that it cannot take yet, while it waits
  // for a record behind it.
  const uint64_t forwarded = segment_bytes * std::max(program.world - 2, 1);
  const uint64_t affordable = std::max<uint64_t>(1, kForwardBudget / forwarded);
  const uint64_t wanted = std::min({call.on_device ? kDeviceWindow : kWindow, segments,
                                    wires == nullptr     ? affordable
                                    : wires->exchanges() ? Rounds::window(program.levels)
                                                         : wires->window(program.world)});
  window = std::max<uint64_t>(1, wanted);
}

size_t Cut::segment_length(uint64_t position, int slot) const {
  const size_t from = position * segment_bytes, bytes = slot_bytes(slot);
  return from >= bytes ? 0 : std::min(segment_bytes, bytes - from);
}

size_t Cut::slot_bytes(int slot) const {
  if (slot >= program.slots) slot = program.scratch[slot - program.slots];
  return call.slots[slot].bytes;
}

// A step exists in segment 0 of the tensor, and in every other segment in which its slot has bytes.
uint64_t Cut::segments_of(int step) const {
  const size_t bytes = slot_bytes(program.steps[step].slot);
  const uint64_t count = bytes == 0 ? 1 : (bytes + segment_bytes - 1) / segment_bytes;
  const uint64_t turn = kStripe * call.lanes;  // one stripe for every lane
  const uint64_t before = kStripe * call.lane;
  const uint64_t rest = count % turn;
  return count / turn * kStripe + std::min(kStripe, rest > before ? rest - before : 0);
}

uint64_t Cut::position(uint64_t segment) const {
  return (segment / kStripe * call.lanes + call.lane) * kStripe + segment % kStripe;
}

uint64_t Cut::segment_at(uint64_t position) const {
  return position / (kStripe * call.lanes) * kStripe + position % kStripe;
}

size_t Cut::lanes_used(const Call& call) {
  if (call.lanes == 1) return 1;
  size_t longest = 0;
  for (const Slot& slot : call.slots) longest = std::max(longest, slot.bytes);
  const uint64_t stripe = kStripe * call.segment_bytes;
  return std::clamp<uint64_t>((longest + stripe - 1) / stripe, 1, call.lanes);
}

std::vector<std::span<uint8_t>> Cut::results() const {
  std::set<int> written;
  for (const Step& step : program.steps) {
    if (writes(step.action) && step.slot < program.slots) written.insert(step.slot);
  }
  std::vector<std::span<uint8_t>> out;
  for (int slot : written) {
    if (call.slots[slot].bytes != 0)
      out.emplace_back(call.slots[slot].data, call.slots[slot].bytes);
  }
  return out;
}

}  // namespace sealring
