// A bundle: several members' bytes in one message, each after its rank and its length, in the order of ranks
// (docs/spec.md, section 4).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "handshake/statements.hpp"

namespace sealring {

inline constexpr size_t kMostOfAnEntry = 64 << 10;

struct BundleEntry {
  uint32_t rank;
  der::Bytes bytes;
};

size_t bundle_size(std::span<const BundleEntry> entries);

// Writes bundle_size() bytes.
void write_bundle(std::span<const BundleEntry> entries, uint8_t* out);

// The entries refer to `raw`. Throws MalformedStatement if `raw` is no bundle.
std::vector<BundleEntry> read_bundle(der::Bytes raw);

}  // namespace sealring
