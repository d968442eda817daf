// HKDF of RFC 5869.
#pragma once

#include <cstddef>
#include <span>
#include <string_view>
#include <vector>

#include "keys/secret_memory.hpp"

namespace sealring {

enum class Hash { sha256, sha512 };

// HKDF-Extract and HKDF-Expand.
SecretBytes hkdf(Hash hash, const SecretBytes& secret, std::string_view salt, std::string_view info,
                 size_t bytes);

// Derives a secret for each info; HKDF-Extract runs only once.
std::vector<SecretBytes> hkdf_each(Hash hash, const SecretBytes& secret, std::string_view salt,
                                   std::span<const std::string_view> infos, size_t bytes);

// HKDF-Expand alone. `key` must already be uniformly random.
SecretBytes hkdf_expand(Hash hash, const SecretBytes& key, std::string_view info, size_t bytes);

}  // namespace sealring
