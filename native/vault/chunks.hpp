// The format of C2SP's chunked encryption (c2sp.org/chunked-encryption), without input or output.
//
//   file = salt(24) || commitment(32) || chunk || chunk || ... || last chunk
//
// Each chunk is 16 KiB of plaintext, sealed, and its tag. The last chunk is always shorter, and may be empty.
// So a file that was cut between two chunks ends with a full chunk, and the cut is noticed.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "keys/keys.hpp"

namespace sealring {

inline constexpr size_t kSaltBytes = 24;
inline constexpr size_t kCommitmentBytes = 32;
inline constexpr size_t kFileHeaderBytes = kSaltBytes + kCommitmentBytes;
inline constexpr size_t kChunkBytes = 16384;
inline constexpr size_t kSealedChunkBytes = kChunkBytes + kTagBytes;
inline constexpr uint64_t kMaxChunks = 1ull << 38;

using Salt = std::array<uint8_t, kSaltBytes>;
using Commitment = std::array<uint8_t, kCommitmentBytes>;

// The size of the digest of a chunk's plaintext. A signature over a file can cover the digests, and sealing
// the same plaintext again keeps them.
inline constexpr size_t kDigestBytes = 32;

// This many chunks are sealed or opened with one expanded key, and written or read with one call. Their bytes
// stay in the core's own cache meanwhile, and fork() waits for no more than this.
inline constexpr size_t kBlockChunks = 16;

// The plaintext of consecutive chunks in private memory, `step` bytes apart. All chunks are full except the
// last, which has `last_bytes`.
struct ChunkRow {
  const uint8_t* plain;
  size_t count;
  size_t step;
  size_t last_bytes;
};

// Computes the digests of the chunks and writes them one after the other. Called by several threads.
using ChunkHash = std::function<void(const ChunkRow& chunks, uint8_t* digests)>;
void sha256_of_chunks(const ChunkRow& chunks, uint8_t* digests);
// The digests of all chunks of a sealed file that would hold these bytes.
std::vector<uint8_t> chunk_digests(std::span<const uint8_t> plain, const ChunkHash& hash,
                                   size_t threads);

// The key and the nonce base with which a file's chunks are sealed, and the file's commitment.
struct FileKey {
  KeyBytes key;
  Nonce base;
  Commitment commitment;
  Suite suite;
};

// HKDF-Expand with SHA-512 of the input key over the suite's name, the salt and the context.
FileKey derive_file_key(const KeyBytes& input, Suite suite, const Salt& salt,
                        std::span<const uint8_t> context);

// The base nonce XOR the chunk's number as a big-endian integer.
Nonce chunk_nonce(const Nonce& base, uint64_t chunk);

constexpr uint64_t chunk_offset(uint64_t chunk) {
  return kFileHeaderBytes + chunk * kSealedChunkBytes;
}

// The length of a sealed file with this many bytes of plaintext.
constexpr uint64_t sealed_length(uint64_t plain) {
  return kFileHeaderBytes + plain + (plain / kChunkBytes + 1) * kTagBytes;
}

// The length of the plaintext; empty if no sealed file has this length.
std::optional<uint64_t> plain_length(uint64_t sealed);

}  // namespace sealring
