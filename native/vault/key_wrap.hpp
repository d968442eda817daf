// AES-256 key wrap with padding (RFC 5649): one key sealed under another, without a nonce.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "keys/keys.hpp"

namespace sealring {

std::vector<uint8_t> wrap_key(const KeyBytes& wrapping, const SecretBytes& key);

// Returns nothing if `wrapped` was not made under this key, or was changed.
std::optional<SecretBytes> unwrap_key(const KeyBytes& wrapping, std::span<const uint8_t> wrapped);

}  // namespace sealring
