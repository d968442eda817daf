#include "keys/sha256.hpp"

#include <stdexcept>

#include "keys/secret_memory.hpp"

namespace sealring {

const EVP_MD* sha256_algorithm() {
  static const EVP_MD* const found = [] {
    const NoFork no_fork;
    return EVP_MD_fetch(nullptr, "SHA256", nullptr);
  }();
  if (found == nullptr) throw std::runtime_error("OpenSSL has no SHA-256");
  return found;
}

}  // namespace sealring
