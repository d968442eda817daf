// The GPU's arithmetic on the CPU: one record as the threads of a cluster compute it.
//
// It is slow, and no group uses it: it lets machines without a GPU hold the text that GPUs compile
// (chacha20_poly1305.hpp) against the official vectors, places and powers included.
#pragma once

#include <cstdint>
#include <span>

#include "keys/keys.hpp"

namespace sealring {

// Reads nothing of what it writes, so others may be able to write there. `plain` is read once.
void gpu_seal(const KeyBytes& key, const Nonce& nonce, std::span<const uint8_t> associated,
              const uint8_t* plain, size_t bytes, uint8_t* cipher, uint8_t* tag);

// False, with nothing written, when the tag does not match. It reads `cipher` twice, so no other process
// may be able to write there.
[[nodiscard]] bool gpu_open(const KeyBytes& key, const Nonce& nonce,
                            std::span<const uint8_t> associated, const uint8_t* cipher,
                            size_t bytes, const uint8_t* tag, uint8_t* plain);

}  // namespace sealring
