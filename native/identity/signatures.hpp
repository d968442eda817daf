// Public keys from certificates, and the check of signatures with them.
#pragma once

#include <openssl/evp.h>

#include <array>
#include <cstdint>
#include <memory>
#include <optional>

#include "identity/der.hpp"

namespace sealring {

struct FreeKey {
  void operator()(EVP_PKEY* key) const { EVP_PKEY_free(key); }
};
using PublicKey = std::unique_ptr<EVP_PKEY, FreeKey>;
using Digest = std::array<uint8_t, 32>;

Digest sha256(der::Bytes bytes);

// Whether the bytes are the SubjectPublicKeyInfo of an Ed25519 key (RFC 8410).
bool is_ed25519_key(der::Bytes info);

// Reads a SubjectPublicKeyInfo. Returns null if it is none, or if TLS refuses the key's type or strength.
PublicKey read_public_key(der::Bytes info);

// SHA-256 of the key's SubjectPublicKeyInfo in the form that sealring writes (curve points uncompressed),
// whatever form `info` has. Empty if there is no such key.
std::optional<Digest> public_key_digest(der::Bytes info);

// Verifies certificates' signatures with one key. For one thread; the key must outlive it.
class CertificateSignatures {
 public:
  explicit CertificateSignatures(EVP_PKEY* key);
  // Verifies the signature over a certificate's content; `algorithm` is the certificate's
  // AlgorithmIdentifier. Signatures with MD5 or SHA-1 are refused.
  bool verify(der::Bytes algorithm, der::Bytes content, der::Bytes signature);

 private:
  struct Free {
    void operator()(EVP_MD_CTX* context) const { EVP_MD_CTX_free(context); }
  };
  EVP_PKEY* key_;
  // For an Ed25519 key; kept, because making one takes 4 us.
  std::unique_ptr<EVP_MD_CTX, Free> ed25519_;
};

// Verifies messages that workers sign with Ed25519, Ed448, ECDSA with SHA-256, or RSA-PSS with SHA-256 and a
// salt of 32 bytes. For one thread.
class MessageSignatures {
 public:
  MessageSignatures();
  // `key` is a SubjectPublicKeyInfo.
  bool verify(der::Bytes key, der::Bytes signature, der::Bytes message);

 private:
  struct Free {
    void operator()(EVP_PKEY_CTX* context) const { EVP_PKEY_CTX_free(context); }
  };
  PublicKey read(der::Bytes key);

  // Reads Ed25519 keys; kept, because making one takes 3 us.
  std::unique_ptr<EVP_PKEY_CTX, Free> ed25519_;
};

}  // namespace sealring
