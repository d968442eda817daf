#include "keys/hkdf.hpp"

#include <openssl/core_names.h>
#include <openssl/evp.h>
#include <openssl/kdf.h>
#include <openssl/params.h>

#include <memory>
#include <stdexcept>

namespace sealring {
namespace {

// The parameters' constructors take pointers to non-const; the derivation only reads them.
OSSL_PARAM octets(const char* name, const void* data, size_t size) {
  return OSSL_PARAM_construct_octet_string(name, const_cast<void*>(data), size);
}

// Holds one secret in OpenSSL's memory, for as long as this object exists.
class Derivation {
 public:
  Derivation(int mode, Hash hash, const SecretBytes& secret, std::string_view salt)
      : context_(EVP_KDF_CTX_new(algorithm()), EVP_KDF_CTX_free) {
    secret.require_key();
    const char* const digest = hash == Hash::sha256 ? "SHA256" : "SHA512";
    const OSSL_PARAM params[] = {
        OSSL_PARAM_construct_int(OSSL_KDF_PARAM_MODE, &mode),
        OSSL_PARAM_construct_utf8_string(OSSL_KDF_PARAM_DIGEST, const_cast<char*>(digest), 0),
        octets(OSSL_KDF_PARAM_KEY, secret.data(), secret.size()),
        octets(OSSL_KDF_PARAM_SALT, salt.data(), salt.size()),
        OSSL_PARAM_construct_end(),
    };
    require(context_ && EVP_KDF_CTX_set_params(context_.get(), params) == 1);
  }

  SecretBytes derive(std::string_view info, size_t bytes) {
    const OSSL_PARAM params[] = {octets(OSSL_KDF_PARAM_INFO, info.data(), info.size()),
                                 OSSL_PARAM_construct_end()};
    SecretBytes out(bytes);
    require(EVP_KDF_derive(context_.get(), out.data(), out.size(), params) == 1);
    return out;
  }

 private:
  // Looked up once: the lookup takes as long as deriving a key.
  static EVP_KDF* algorithm() {
    static EVP_KDF* const found = EVP_KDF_fetch(nullptr, OSSL_KDF_NAME_HKDF, nullptr);
    return found;
  }

  static void require(bool good) {
    // OpenSSL refuses this only when out of memory or wrongly built.
    if (!good) throw std::runtime_error("OpenSSL failed in HKDF");
  }

  const NoFork no_fork_;  // declared first: it ends after OpenSSL has overwritten the secret
  const std::unique_ptr<EVP_KDF_CTX, decltype(&EVP_KDF_CTX_free)> context_;
};

}  // namespace

SecretBytes hkdf(Hash hash, const SecretBytes& secret, std::string_view salt, std::string_view info,
                 size_t bytes) {
  return Derivation(EVP_KDF_HKDF_MODE_EXTRACT_AND_EXPAND, hash, secret, salt).derive(info, bytes);
}

std::vector<SecretBytes> hkdf_each(Hash hash, const SecretBytes& secret, std::string_view salt,
                                   std::span<const std::string_view> infos, size_t bytes) {
  const SecretBytes extracted = Derivation(EVP_KDF_HKDF_MODE_EXTRACT_ONLY, hash, secret, salt)
                                    .derive("", hash == Hash::sha256 ? 32 : 64);
  Derivation expansion(EVP_KDF_HKDF_MODE_EXPAND_ONLY, hash, extracted, "");
  std::vector<SecretBytes> out;
  out.reserve(infos.size());
  for (const std::string_view info : infos) out.push_back(expansion.derive(info, bytes));
  return out;
}

SecretBytes hkdf_expand(Hash hash, const SecretBytes& key, std::string_view info, size_t bytes) {
  return Derivation(EVP_KDF_HKDF_MODE_EXPAND_ONLY, hash, key, "").derive(info, bytes);
}

}  // namespace sealring
