// Writes one sealed file from start to end, with as many threads as it is given.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "vault/chunks.hpp"

namespace sealring {

// Any thread may call; calls run one after the other.
class SealedFileWriter {
 public:
  using Plain = std::span<const uint8_t>;

  // Where ciphertext goes: to a file that stays the caller's, or to memory that take() hands out.
  static constexpr int kToMemory = -1;

  // Draws a salt and writes the header at the file's start. `hash`: what digests() are; none without.
  SealedFileWriter(int file, const KeyBytes& key, Suite suite, std::span<const uint8_t> context,
                   std::string name, size_t threads, ChunkHash hash = {});

  // Seals what follows what was written before. Full chunks are sealed from where they lie; what is
  // left over, less than a chunk, is kept until more comes. The pieces may be memory that others
  // write: a chunk then holds what was there at some time during the call. Ciphertext is made in
  // private memory.
  void write(std::span<const Plain> pieces);
  // Seals the last chunk and overwrites the key. Nothing can be written after it.
  void finish();

  // The ciphertext since the last call; for kToMemory alone.
  std::vector<uint8_t> take();

  const Commitment& commitment() const { return key_.commitment; }
  uint64_t length() const;
  // The digests of all chunks as they were sealed, one behind the other, after finish().
  std::vector<uint8_t> digests() const;

 private:
  void seal_full_chunks(std::span<const Plain> stream, size_t chunks);
  // Of the blocks before the chunk `end`.
  void start_writing_back(uint64_t end) const;
  void seal_chunk(Aead::Use& use, uint64_t number, const uint8_t* plain, size_t bytes,
                  uint8_t* out) const;
  void put(uint64_t offset, const uint8_t* bytes, size_t count);
  void require_usable() const;

  mutable std::mutex lock_;  // two calls at once would seal two chunks under one nonce
  int file_;
  FileKey key_;
  std::string name_;
  size_t threads_;
  std::vector<uint8_t> rest_;  // plaintext behind the last full chunk
  uint64_t sealed_chunks_ = 0;
  ChunkHash hash_;
  std::vector<uint8_t> digests_;
  std::vector<uint8_t> memory_;
  uint64_t memory_start_ = 0;  // the file's offset of memory_[0]
  enum class State { writing, finished, failed } state_ = State::writing;
};

}  // namespace sealring
