// Public keys as certificates have them, and the signatures that are verified with them.
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

// The SubjectPublicKeyInfo of an Ed25519 key (RFC 8410).
bool is_ed25519_key(der::Bytes info);

// From a SubjectPublicKeyInfo; nothing where it is none, or is of a kind or of a strength that TLS refuses.
PublicKey read_public_key(der::Bytes info);

// SHA-256 of the key's SubjectPublicKeyInfo in the one form that sealring writes, whatever form `info` has:
// a point of a curve is not compressed. Nothing where there is no such key.
std::optional<Digest> public_key_digest(der::Bytes info);

// Verifies what one key has signed of certificates. One thread uses it; the key must outlive it.
class CertificateSignatures {
 public:
  explicit CertificateSignatures(EVP_PKEY* key);
  // Of a certificate's content: `algorithm` is the AlgorithmIdentifier in it. MD5 and SHA-1 sign nothing.
  bool verify(der::Bytes algorithm, der::Bytes content, der::Bytes signature);

 private:
  struct Free {
    void operator()(EVP_MD_CTX* context) const { EVP_MD_CTX_free(context); }
  };
  EVP_PKEY* key_;
  std::unique_ptr<EVP_MD_CTX, Free> ed25519_;  // for such a key: kept, because a new one takes 4 us
};

// Verifies messages that workers sign: with Ed25519, Ed448, ECDSA with SHA-256, or RSA-PSS with SHA-256 and a salt
// of 32 bytes. One thread uses it.
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

  std::unique_ptr<EVP_PKEY_CTX, Free> ed25519_;  // reads such keys; a new one takes 3 us
};

}  // namespace sealring
