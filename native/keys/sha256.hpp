#pragma once

#include <openssl/evp.h>

namespace sealring {

// SHA-256, looked up once: the lookup takes longer than a short hash, and takes a lock that all threads
// share.
const EVP_MD* sha256_algorithm();

}  // namespace sealring
