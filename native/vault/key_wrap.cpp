#include "vault/key_wrap.hpp"

#include <openssl/evp.h>

#include <algorithm>
#include <memory>
#include <stdexcept>

namespace sealring {
namespace {

constexpr size_t kMaxWrapped = 4096;  // the longest key in bytes
constexpr size_t kBlock = 8;

struct CipherContext {
  explicit CipherContext(bool wrap, const KeyBytes& key)
      : cipher(EVP_CIPHER_fetch(nullptr, "AES-256-WRAP-PAD", nullptr), EVP_CIPHER_free),
        context(EVP_CIPHER_CTX_new(), EVP_CIPHER_CTX_free) {
    key.require_key();
    if (cipher == nullptr || context == nullptr) {
      throw std::runtime_error("this OpenSSL has no AES key wrap");
    }
    EVP_CIPHER_CTX_set_flags(context.get(), EVP_CIPHER_CTX_FLAG_WRAP_ALLOW);
    if (EVP_CipherInit_ex2(context.get(), cipher.get(), key.data(), nullptr, wrap ? 1 : 0,
                           nullptr) != 1) {
      throw std::runtime_error("OpenSSL failed in AES key wrap");
    }
  }
  const NoFork no_fork;
  const std::unique_ptr<EVP_CIPHER, decltype(&EVP_CIPHER_free)> cipher;
  const std::unique_ptr<EVP_CIPHER_CTX, decltype(&EVP_CIPHER_CTX_free)> context;
};

}  // namespace

std::vector<uint8_t> wrap_key(const KeyBytes& wrapping, const SecretBytes& key) {
  key.require_key();
  if (key.size() > kMaxWrapped) throw std::runtime_error("too long for a key");
  const CipherContext context(true, wrapping);
  std::vector<uint8_t> out(key.size() + 2 * kBlock);
  int written = 0;
  if (EVP_CipherUpdate(context.context.get(), out.data(), &written, key.data(),
                       static_cast<int>(key.size())) != 1) {
    throw std::runtime_error("OpenSSL failed in AES key wrap");
  }
  out.resize(static_cast<size_t>(written));
  return out;
}

std::optional<SecretBytes> unwrap_key(const KeyBytes& wrapping, std::span<const uint8_t> wrapped) {
  if (wrapped.size() < 2 * kBlock || wrapped.size() > kMaxWrapped + 2 * kBlock ||
      wrapped.size() % kBlock != 0) {
    return std::nullopt;
  }
  const CipherContext context(false, wrapping);
  SecretBytes room(wrapped.size() + kBlock);
  int written = 0;
  if (EVP_CipherUpdate(context.context.get(), room.data(), &written, wrapped.data(),
                       static_cast<int>(wrapped.size())) != 1 ||
      written <= 0) {
    return std::nullopt;
  }
  SecretBytes key(static_cast<size_t>(written));
  std::copy_n(room.begin(), key.size(), key.begin());
  return key;
}

}  // namespace sealring
