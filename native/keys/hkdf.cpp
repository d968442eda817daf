#include "keys/hkdf.hpp"

#include <openssl/core_names.h>
#include <openssl/evp.h>
#include <openssl/kdf.h>
#include <openssl/params.h>

#include <memory>
#include <stdexcept>

namespace sealring {
namespace {

SecretBytes derive(int mode, Hash hash, const SecretBytes& secret, std::string_view salt,
                   std::string_view info, size_t bytes) {
  secret.require_key();
  const KeyInUse in_use;
  const std::unique_ptr<EVP_KDF, decltype(&EVP_KDF_free)> kdf(
      EVP_KDF_fetch(nullptr, OSSL_KDF_NAME_HKDF, nullptr), EVP_KDF_free);
  const std::unique_ptr<EVP_KDF_CTX, decltype(&EVP_KDF_CTX_free)> context(
      kdf ? EVP_KDF_CTX_new(kdf.get()) : nullptr, EVP_KDF_CTX_free);
  // The parameters' constructors take pointers to non-const; the derivation only reads them.
  const auto octets = [](const char* name, const void* data, size_t size) {
    return OSSL_PARAM_construct_octet_string(name, const_cast<void*>(data), size);
  };
  const char* digest = hash == Hash::sha256 ? "SHA256" : "SHA512";
  OSSL_PARAM params[] = {
      OSSL_PARAM_construct_int(OSSL_KDF_PARAM_MODE, &mode),
      OSSL_PARAM_construct_utf8_string(OSSL_KDF_PARAM_DIGEST, const_cast<char*>(digest), 0),
      octets(OSSL_KDF_PARAM_KEY, secret.data(), secret.size()),
      octets(OSSL_KDF_PARAM_INFO, info.data(), info.size()),
      octets(OSSL_KDF_PARAM_SALT, salt.data(), salt.size()),
      OSSL_PARAM_construct_end(),
  };
  SecretBytes out(bytes);
  // OpenSSL refuses this only when out of memory or wrongly built.
  if (!context || EVP_KDF_derive(context.get(), out.data(), out.size(), params) != 1) {
    throw std::runtime_error("OpenSSL failed in HKDF");
  }
  return out;
}

}  // namespace

SecretBytes hkdf(Hash hash, const SecretBytes& secret, std::string_view salt, std::string_view info,
                 size_t bytes) {
  return derive(EVP_KDF_HKDF_MODE_EXTRACT_AND_EXPAND, hash, secret, salt, info, bytes);
}

SecretBytes hkdf_expand(Hash hash, const SecretBytes& key, std::string_view info, size_t bytes) {
  return derive(EVP_KDF_HKDF_MODE_EXPAND_ONLY, hash, key, "", info, bytes);
}

}  // namespace sealring
