// A group's last words to its peers.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "link.hpp"

namespace sealring {

using Links = std::vector<std::unique_ptr<Link>>;  // by rank; empty for our own

// Sends an alert or a bye to every peer, and waits a little for it to leave.
void say_and_leave(Links& links, Kind kind, std::span<const uint8_t> payload);

}  // namespace sealring
