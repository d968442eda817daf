// Alerts: the last record of a rank that saw a failure, so that all ranks end with the same error.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "record/failure.hpp"

namespace sealring {

inline constexpr size_t kMaxAlertText = 512;

std::vector<uint8_t> encode_alert(const Failure& failure, int rank);

// Returns the failure that an alert describes. A payload that cannot be read is still an alert: it gives a
// peer_lost about its sender. The sender can write what it likes. So if the alert names a witness that is not
// one of the group's `ranks`, or that is the `receiver` itself, which saw nothing, the sender becomes the
// witness.
Failure decode_alert(std::span<const uint8_t> payload, int sender, int receiver, int ranks);

}  // namespace sealring
