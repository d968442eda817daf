// Keys that count their nonces and ratchet themselves forward.
#pragma once

#include <openssl/evp.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <span>

#include "keys/secret_memory.hpp"

namespace sealring {

inline constexpr size_t kKeyBytes = 32;
inline constexpr size_t kNonceBytes = 12;
inline constexpr size_t kTagBytes = 16;

// A key. Every copy is in the memory for keys (secret_memory.hpp).
struct KeyBytes : SecretBytes {
  KeyBytes() : SecretBytes(kKeyBytes) {}
  KeyBytes(std::initializer_list<uint8_t> bytes) : KeyBytes() {
    std::copy_n(bytes.begin(), std::min(bytes.size(), kKeyBytes), begin());
  }
};
using Nonce = std::array<uint8_t, kNonceBytes>;

// 32-bit lane, 64-bit count, little-endian. A (key, lane, count) triple is used once.
Nonce make_nonce(uint32_t lane, uint64_t count);

// The next key of the chain: HKDF-Expand(key, "sealring 1 ratchet"). The old key cannot be computed from it.
KeyBytes ratchet(const KeyBytes& key);

// The key for what GPUs seal: HKDF-Expand(key, "sealring 1 gpu"). So no key serves two suites.
KeyBytes gpu_key(const KeyBytes& key);

// The keys of further lanes. lanes_key() is HKDF-Expand(key, "sealring 1 lanes"). lane_key() is
// HKDF-Expand(lanes, "sealring 1 lane" and the lane as 4 bytes, little-endian). So no two lanes share a key,
// and each lane replaces its own.
KeyBytes lanes_key(const KeyBytes& key);
KeyBytes lane_key(const KeyBytes& lanes, uint32_t lane);

// CPUs have instructions for AES, so they use AES-256-GCM; GPUs have none and use ChaCha20-Poly1305.
enum class Suite { aes_256_gcm, chacha20_poly1305 };

// One key, for sealing or for opening.
//
// OpenSSL expands a key into its own memory, which can neither be wiped on fork nor left out of core files.
// So the key is expanded for each use, and the expanded form is overwritten afterwards: between two uses it
// exists nowhere. This costs about 0.5 us (docs/spec.md, section 5).
class Aead {
 public:
  enum class Direction { seal, open };
  // Published test vectors have keys of zeros; nothing else may.
  enum class Zeros { refused, allowed };
  Aead(const KeyBytes& key, Direction direction, Suite suite = Suite::aes_256_gcm,
       Zeros zeros = Zeros::refused);

  // The expanded key. Only one Use of an Aead may exist at a time.
  class Use {
   public:
    // Throws ForkedProcess in a process that did not make the key.
    explicit Use(const Aead& aead);
    ~Use();
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;

    void seal(const Nonce& nonce, std::span<const uint8_t> associated, const uint8_t* plain,
              size_t bytes, uint8_t* cipher, uint8_t* tag);
    // False when the tag does not match. `plain` then holds bytes that must not be used; it must
    // be memory that no other process can see.
    [[nodiscard]] bool open(const Nonce& nonce, std::span<const uint8_t> associated,
                            const uint8_t* cipher, size_t bytes, const uint8_t* tag,
                            uint8_t* plain);

   private:
    const NoFork no_fork_;  // declared first: it ends after the context is clean again
    const Aead& aead_;
  };

  void seal(const Nonce& nonce, std::span<const uint8_t> associated, const uint8_t* plain,
            size_t bytes, uint8_t* cipher, uint8_t* tag) const {
    Use(*this).seal(nonce, associated, plain, bytes, cipher, tag);
  }
  [[nodiscard]] bool open(const Nonce& nonce, std::span<const uint8_t> associated,
                          const uint8_t* cipher, size_t bytes, const uint8_t* tag,
                          uint8_t* plain) const {
    return Use(*this).open(nonce, associated, cipher, bytes, tag, plain);
  }

  const KeyBytes& key() const { return key_; }
  Suite suite() const { return suite_; }

 private:
  struct Free {
    void operator()(EVP_CIPHER_CTX* context) const { EVP_CIPHER_CTX_free(context); }
  };
  KeyBytes key_;
  Direction direction_;
  Suite suite_;
  Zeros zeros_;
  std::unique_ptr<EVP_CIPHER_CTX, Free> context_;  // holds a key only while a Use exists
};

// A key's slot in a device's memory, and the generation that is there.
struct DeviceKeySlot {
  int slot = -1;
  uint32_t generation = 0;
};

// The sealing end: gives out each nonce once and ratchets before the key has sealed too much.
class SealingKey {
 public:
  SealingKey(const KeyBytes& key, uint64_t rekey_bytes, Suite suite = Suite::aes_256_gcm);
  SealingKey(const SealingKey&) = delete;
  SealingKey& operator=(const SealingKey&) = delete;

  struct Reservation {
    uint32_t generation;
    uint64_t count;
  };
  // Reserves the number of the next record, or of the first of several. The count continues across ratchets,
  // so a nonce would not repeat even if a key did.
  Reservation advance(size_t bytes, size_t records = 1);
  // Whether advance() would replace the key first.
  bool ratchets_before(size_t bytes, size_t records = 1) const {
    return sealed_bytes_ != 0 && sealed_bytes_ + bytes + records * kTagBytes > rekey_bytes_;
  }
  const Aead& aead() const { return aead_; }
  // How often the key was replaced.
  uint32_t rekeys() const { return generation_; }
  uint32_t generation() const { return generation_; }
  const KeyBytes& bytes() const { return aead_.key(); }

  DeviceKeySlot on_device;

 private:
  Aead aead_;
  uint64_t rekey_bytes_;
  uint64_t sealed_bytes_ = 0;
  uint32_t generation_ = 0;
  uint64_t count_ = 0;
};

// The opening end: follows the ratchet one generation at a time, and only for a record that
// proves to be sealed under the next key.
class OpeningKey {
 public:
  explicit OpeningKey(const KeyBytes& key, Suite suite = Suite::aes_256_gcm);
  OpeningKey(const OpeningKey&) = delete;
  OpeningKey& operator=(const OpeningKey&) = delete;

  // Checks the tag over `associated` alone.
  [[nodiscard]] bool authentic(uint32_t generation, const Nonce& nonce,
                               std::span<const uint8_t> associated, const uint8_t* tag);
  [[nodiscard]] bool open(const Nonce& nonce, std::span<const uint8_t> associated,
                          const uint8_t* cipher, size_t bytes, const uint8_t* tag, uint8_t* plain);

  uint32_t generation() const { return generation_; }
  const KeyBytes& bytes() const { return aead_.key(); }

  uint64_t expected_count = 0;  // of the next record
  DeviceKeySlot on_device;

 private:
  Aead aead_;
  uint32_t generation_ = 0;
};

}  // namespace sealring
