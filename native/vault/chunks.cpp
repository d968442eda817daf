#include "vault/chunks.hpp"

#include <openssl/evp.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <string_view>

#include "keys/hkdf.hpp"
#include "keys/sha256.hpp"
#include "vault/parallel.hpp"

namespace sealring {
namespace {

std::string_view registered_name(Suite suite) {
  return suite == Suite::aes_256_gcm ? "AEAD_AES_256_GCM" : "AEAD_CHACHA20_POLY1305";
}

std::string info_of(Suite suite, const Salt& salt, std::span<const uint8_t> context) {
  std::string info = "c2sp.org/chunked-encryption@v1+";
  info += registered_name(suite);
  info.push_back(0);
  info.append(salt.begin(), salt.end());
  info.append(context.begin(), context.end());
  return info;
}

}  // namespace

FileKey derive_file_key(const KeyBytes& input, Suite suite, const Salt& salt,
                        std::span<const uint8_t> context) {
  const SecretBytes derived = hkdf_expand(Hash::sha512, input, info_of(suite, salt, context),
                                          kKeyBytes + kNonceBytes + kCommitmentBytes);
  FileKey made{.key = {}, .base = {}, .commitment = {}, .suite = suite};
  std::copy_n(derived.begin(), kKeyBytes, made.key.begin());
  std::copy_n(derived.begin() + kKeyBytes, kNonceBytes, made.base.begin());
  std::copy_n(derived.begin() + kKeyBytes + kNonceBytes, kCommitmentBytes, made.commitment.begin());
  return made;
}

void sha256_of_chunks(const ChunkRow& chunks, uint8_t* digests) {
  for (size_t i = 0; i < chunks.count; ++i) {
    const size_t bytes = i + 1 < chunks.count ? kChunkBytes : chunks.last_bytes;
    if (EVP_Digest(chunks.plain + i * chunks.step, bytes, digests + i * kDigestBytes, nullptr,
                   sha256_algorithm(), nullptr) != 1) {
      throw std::runtime_error("OpenSSL cannot compute SHA-256");
    }
  }
}

std::vector<uint8_t> chunk_digests(std::span<const uint8_t> plain, const ChunkHash& hash,
                                   size_t threads) {
  const size_t chunks = plain.size() / kChunkBytes + 1;
  std::vector<uint8_t> digests(chunks * kDigestBytes);
  share_work((chunks + kBlockChunks - 1) / kBlockChunks, threads, [&](size_t block) {
    const size_t first = block * kBlockChunks;
    const size_t count = std::min(kBlockChunks, chunks - first);
    const bool last = first + count == chunks;
    const ChunkRow row{.plain = plain.data() + first * kChunkBytes,
                       .count = count,
                       .step = kChunkBytes,
                       .last_bytes = last ? plain.size() % kChunkBytes : kChunkBytes};
    hash(row, digests.data() + first * kDigestBytes);
  });
  return digests;
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
