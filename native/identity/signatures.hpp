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

// Whether `key` has signed a certificate's content: `algorithm` is the AlgorithmIdentifier in it. MD5 and SHA-1
// sign nothing.
bool signed_certificate(EVP_PKEY* key, der::Bytes algorithm, der::Bytes content,
                        der::Bytes signature);

// Whether `key` has signed a message as workers do: Ed25519, Ed448, ECDSA with SHA-256, or RSA-PSS with SHA-256
// and a salt of 32 bytes.
bool signed_message(EVP_PKEY* key, der::Bytes signature, der::Bytes message);

}  // namespace sealring
