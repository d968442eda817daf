// The last words of a rank that saw something go wrong, so that all ranks end with one error.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "record/failure.hpp"

namespace sealring {

inline constexpr size_t kMaxAlertText = 512;

std::vector<uint8_t> encode_alert(const Failure& failure, int rank);

// The failure an alert describes, as reported by the rank that saw it. A payload that cannot be
// read still is an alert: it gives a peer_lost about its sender. The sender chooses what it says. If
// the rank that saw it is none of the group's `ranks`, or is the `receiver`, which saw nothing, the
// sender is named: else the receiver would testify to what it was only told.
Failure decode_alert(std::span<const uint8_t> payload, int sender, int receiver, int ranks);

}  // namespace sealring
