#include "vault/chunks.hpp"

#include <openssl/core_names.h>
#include <openssl/evp.h>
#include <openssl/kdf.h>
#include <openssl/params.h>

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <string_view>
#include <vector>

namespace sealring {
namespace {

std::string_view registered_name(Suite suite) {
  return suite == Suite::aes_256_gcm ? "AEAD_AES_256_GCM" : "AEAD_CHACHA20_POLY1305";
}

std::vector<uint8_t> info_of(Suite suite, const Salt& salt, std::span<const uint8_t> context) {
  constexpr std::string_view kPrefix = "c2sp.org/chunked-encryption@v1+";
  const std::string_view name = registered_name(suite);
  std::vector<uint8_t> info(kPrefix.begin(), kPrefix.end());
  info.insert(info.end(), name.begin(), name.end());
  info.push_back(0);
  info.insert(info.end(), salt.begin(), salt.end());
  info.insert(info.end(), context.begin(), context.end());
  return info;
}

// HKDF-Expand of RFC 5869 with SHA-512.
SecretBytes expand_sha512(const KeyBytes& key, const std::vector<uint8_t>& info, size_t bytes) {
  key.require_key();
  const KeyInUse in_use;
  static constexpr char kDigest[] = "SHA512";
  const std::unique_ptr<EVP_KDF, decltype(&EVP_KDF_free)> hkdf(
      EVP_KDF_fetch(nullptr, OSSL_KDF_NAME_HKDF, nullptr), EVP_KDF_free);
  const std::unique_ptr<EVP_KDF_CTX, decltype(&EVP_KDF_CTX_free)> context(
      EVP_KDF_CTX_new(hkdf.get()), EVP_KDF_CTX_free);
  int mode = EVP_KDF_HKDF_MODE_EXPAND_ONLY;
  // The parameters' constructors take pointers to non-const; the derivation only reads them.
  OSSL_PARAM params[] = {
      OSSL_PARAM_construct_int(OSSL_KDF_PARAM_MODE, &mode),
      OSSL_PARAM_construct_utf8_string(OSSL_KDF_PARAM_DIGEST, const_cast<char*>(kDigest), 0),
      OSSL_PARAM_construct_octet_string(OSSL_KDF_PARAM_KEY, const_cast<uint8_t*>(key.data()),
                                        key.size()),
      OSSL_PARAM_construct_octet_string(OSSL_KDF_PARAM_INFO, const_cast<uint8_t*>(info.data()),
                                        info.size()),
      OSSL_PARAM_construct_end(),
  };
  SecretBytes out(bytes);
  if (!context || EVP_KDF_derive(context.get(), out.data(), out.size(), params) != 1) {
    throw std::runtime_error("OpenSSL failed in HKDF-Expand");
  }
  return out;
}

}  // namespace

FileKey derive_file_key(const KeyBytes& input, Suite suite, const Salt& salt,
                        std::span<const uint8_t> context) {
  const SecretBytes derived = expand_sha512(input, info_of(suite, salt, context),
                                            kKeyBytes + kNonceBytes + kCommitmentBytes);
  FileKey made{.key = {}, .base = {}, .commitment = {}, .suite = suite};
  std::copy_n(derived.begin(), kKeyBytes, made.key.begin());
  std::copy_n(derived.begin() + kKeyBytes, kNonceBytes, made.base.begin());
  std::copy_n(derived.begin() + kKeyBytes + kNonceBytes, kCommitmentBytes, made.commitment.begin());
  return made;
}

void digest_chunk(const uint8_t* plain, size_t bytes, uint8_t* digest) {
  if (EVP_Q_digest(nullptr, "SHA256", nullptr, plain, bytes, digest, nullptr) != 1) {
    throw std::runtime_error("OpenSSL cannot compute SHA-256");
  }
}

Nonce chunk_nonce(const Nonce& base, uint64_t chunk) {
  Nonce nonce = base;
  for (size_t i = 0; i < sizeof chunk; ++i) {
    nonce[kNonceBytes - 1 - i] ^= static_cast<uint8_t>(chunk >> (8 * i));
  }
  return nonce;
}

std::optional<uint64_t> plain_length(uint64_t sealed) {
  if (sealed < kFileHeaderBytes) return std::nullopt;
  const uint64_t chunks = (sealed - kFileHeaderBytes) / kSealedChunkBytes;
  const uint64_t last = (sealed - kFileHeaderBytes) % kSealedChunkBytes;
  if (last < kTagBytes || chunks >= kMaxChunks) return std::nullopt;
  return chunks * kChunkBytes + (last - kTagBytes);
}

}  // namespace sealring
