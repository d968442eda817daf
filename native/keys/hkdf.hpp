// HKDF of RFC 5869.
#pragma once

#include <cstddef>
#include <span>
#include <string_view>

#include "keys/secret_memory.hpp"

namespace sealring {

enum class Hash { sha256, sha512 };

// Extract and Expand.
SecretBytes hkdf(Hash hash, const SecretBytes& secret, std::string_view salt, std::string_view info,
                 size_t bytes);

// Expand alone: `key` is as random as its length says.
SecretBytes hkdf_expand(Hash hash, const SecretBytes& key, std::string_view info, size_t bytes);

}  // namespace sealring
