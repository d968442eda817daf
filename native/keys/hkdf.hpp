// HKDF of RFC 5869.
#pragma once

#include <cstddef>
#include <span>
#include <string_view>
#include <vector>

#include "keys/secret_memory.hpp"

namespace sealring {

enum class Hash { sha256, sha512 };

// Extract and Expand.
SecretBytes hkdf(Hash hash, const SecretBytes& secret, std::string_view salt, std::string_view info,
                 size_t bytes);

// The same with each info in turn: Extract is made once.
std::vector<SecretBytes> hkdf_each(Hash hash, const SecretBytes& secret, std::string_view salt,
                                   std::span<const std::string_view> infos, size_t bytes);

// Expand alone: `key` is as random as its length says.
SecretBytes hkdf_expand(Hash hash, const SecretBytes& key, std::string_view info, size_t bytes);

}  // namespace sealring
