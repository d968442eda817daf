#include "keys/keys.hpp"

#include <cstring>
#include <stdexcept>
#include <string>
#include <string_view>

#include "keys/hkdf.hpp"

namespace sealring {
namespace {

void openssl_did(bool good, const char* what) {
  // OpenSSL refuses these calls only when out of memory or wrongly built: no record is involved.
  if (!good) throw std::runtime_error(std::string("OpenSSL failed in ") + what);
}

KeyBytes expand(const KeyBytes& key, std::string_view info) {
  const SecretBytes expanded = hkdf_expand(Hash::sha256, key, info, kKeyBytes);
  KeyBytes next;
  std::copy_n(expanded.begin(), kKeyBytes, next.begin());
  return next;
}

// Looked up once: the lookup takes longer than expanding a key.
const EVP_CIPHER* cipher_of(Suite suite) {
  static const EVP_CIPHER* const aes = EVP_CIPHER_fetch(nullptr, "AES-256-GCM", nullptr);
  static const EVP_CIPHER* const chacha = EVP_CIPHER_fetch(nullptr, "ChaCha20-Poly1305", nullptr);
  return suite == Suite::aes_256_gcm ? aes : chacha;
}

}  // namespace

Nonce make_nonce(uint32_t lane, uint64_t count) {
  Nonce nonce;
  for (int i = 0; i < 4; ++i) nonce[i] = static_cast<uint8_t>(lane >> (8 * i));
  for (int i = 0; i < 8; ++i) nonce[4 + i] = static_cast<uint8_t>(count >> (8 * i));
  return nonce;
}

KeyBytes ratchet(const KeyBytes& key) { return expand(key, "sealring 1 ratchet"); }

KeyBytes gpu_key(const KeyBytes& key) { return expand(key, "sealring 1 gpu"); }

KeyBytes lanes_key(const KeyBytes& key) { return expand(key, "sealring 1 lanes"); }

KeyBytes lane_key(const KeyBytes& lanes, uint32_t lane) {
  std::string info = "sealring 1 lane";
  for (int i = 0; i < 4; ++i) info.push_back(static_cast<char>(lane >> (8 * i)));
  return expand(lanes, info);
}

Aead::Aead(const KeyBytes& key, Direction direction, Suite suite, Zeros zeros)
    : key_(key),
      direction_(direction),
      suite_(suite),
      zeros_(zeros),
      context_(EVP_CIPHER_CTX_new()) {
  openssl_did(context_ != nullptr, "EVP_CIPHER_CTX_new");
  if (zeros == Zeros::refused) key_.require_key();
}

Aead::Use::Use(const Aead& aead) : aead_(aead) {
  if (aead.zeros_ == Zeros::refused) aead.key_.require_key();
  const int good =
      EVP_CipherInit_ex(aead.context_.get(), cipher_of(aead.suite_), nullptr, aead.key_.data(),
                        nullptr, aead.direction_ == Direction::seal ? 1 : 0);
  if (good != 1) EVP_CIPHER_CTX_reset(aead.context_.get());
  openssl_did(good == 1, "EVP_CipherInit_ex");
}

// OpenSSL overwrites what it frees here: the expanded key and values derived from it.
Aead::Use::~Use() { EVP_CIPHER_CTX_reset(aead_.context_.get()); }

void Aead::Use::seal(const Nonce& nonce, std::span<const uint8_t> associated, const uint8_t* plain,
                     size_t bytes, uint8_t* cipher, uint8_t* tag) {
  EVP_CIPHER_CTX* context = aead_.context_.get();
  int written = 0;
  openssl_did(EVP_EncryptInit_ex(context, nullptr, nullptr, nullptr, nonce.data()) == 1,
              "seal: nonce");
  openssl_did(EVP_EncryptUpdate(context, nullptr, &written, associated.data(),
                                static_cast<int>(associated.size())) == 1,
              "seal: associated data");
  if (bytes != 0) {
    openssl_did(EVP_EncryptUpdate(context, cipher, &written, plain, static_cast<int>(bytes)) == 1,
                "seal: payload");
  }
  openssl_did(EVP_EncryptFinal_ex(context, tag, &written) == 1, "seal: final");
  openssl_did(EVP_CIPHER_CTX_ctrl(context, EVP_CTRL_AEAD_GET_TAG, kTagBytes, tag) == 1,
              "seal: tag");
  // A signal handler may have forked meanwhile: only one of the two processes may send this.
  aead_.key_.process().require("this key");
}

bool Aead::Use::open(const Nonce& nonce, std::span<const uint8_t> associated, const uint8_t* cipher,
                     size_t bytes, const uint8_t* tag, uint8_t* plain) {
  EVP_CIPHER_CTX* context = aead_.context_.get();
  int written = 0;
  openssl_did(EVP_DecryptInit_ex(context, nullptr, nullptr, nullptr, nonce.data()) == 1,
              "open: nonce");
  openssl_did(EVP_DecryptUpdate(context, nullptr, &written, associated.data(),
                                static_cast<int>(associated.size())) == 1,
              "open: associated data");
  if (bytes != 0) {
    openssl_did(EVP_DecryptUpdate(context, plain, &written, cipher, static_cast<int>(bytes)) == 1,
                "open: payload");
  }
  openssl_did(EVP_CIPHER_CTX_ctrl(context, EVP_CTRL_AEAD_SET_TAG, kTagBytes,
                                  const_cast<uint8_t*>(tag)) == 1,
              "open: tag");
  uint8_t nothing[kTagBytes];
  return EVP_DecryptFinal_ex(context, nothing, &written) == 1;
}

SealingKey::SealingKey(const KeyBytes& key, uint64_t rekey_bytes, Suite suite)
    : aead_(key, Aead::Direction::seal, suite), rekey_bytes_(rekey_bytes) {}

SealingKey::Reservation SealingKey::advance(size_t bytes, size_t records) {
  // A record longer than the limit gets a key for itself. An empty record counts too: its tags are made with
  // the key.
  if (ratchets_before(bytes, records)) {
    aead_ = Aead(ratchet(aead_.key()), Aead::Direction::seal, aead_.suite());
    sealed_bytes_ = 0;
    ++generation_;
  }
  sealed_bytes_ += bytes + records * kTagBytes;
  const uint64_t first = count_;
  count_ += records;
  return {generation_, first};
}

OpeningKey::OpeningKey(const KeyBytes& key, Suite suite)
    : aead_(key, Aead::Direction::open, suite) {}

bool OpeningKey::authentic(uint32_t generation, const Nonce& nonce,
                           std::span<const uint8_t> associated, const uint8_t* tag) {
  if (generation == generation_) {
    return aead_.open(nonce, associated, nullptr, 0, tag, nullptr);
  }
  if (generation_ + 1 == 0 || generation != generation_ + 1) return false;
  Aead candidate(ratchet(bytes()), Aead::Direction::open, aead_.suite());
  const bool good = candidate.open(nonce, associated, nullptr, 0, tag, nullptr);
  if (good) {
    aead_ = std::move(candidate);
    generation_ = generation;
  }
  return good;
}

bool OpeningKey::open(const Nonce& nonce, std::span<const uint8_t> associated,
                      const uint8_t* cipher, size_t bytes, const uint8_t* tag, uint8_t* plain) {
  return aead_.open(nonce, associated, cipher, bytes, tag, plain);
}

}  // namespace sealring
