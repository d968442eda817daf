// The GPU's arithmetic on the CPU: computes one record as the threads of a cluster do.
//
// It is slow, and no group uses it. With it, machines without a GPU can check the code that GPUs compile
// (chacha20_poly1305.hpp) against the official vectors, including the division into parts and the powers.
#pragma once

#include <cstdint>
#include <span>

#include "keys/keys.hpp"

namespace sealring {

// Never reads back what it writes, so others may write to that memory. Reads `plain` once.
void gpu_seal(const KeyBytes& key, const Nonce& nonce, std::span<const uint8_t> associated,
              const uint8_t* plain, size_t bytes, uint8_t* cipher, uint8_t* tag);

// Returns false and writes nothing if the tag does not match. Reads `cipher` twice, so no other process may
// be able to write there.
[[nodiscard]] bool gpu_open(const KeyBytes& key, const Nonce& nonce,
                            std::span<const uint8_t> associated, const uint8_t* cipher,
                            size_t bytes, const uint8_t* tag, uint8_t* plain);

}  // namespace sealring
