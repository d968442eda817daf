// Writes one sealed file from start to end, with several threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "vault/chunks.hpp"

namespace sealring {

// Any thread may call its functions; calls run one after the other.
class SealedFileWriter {
 public:
  using Plain = std::span<const uint8_t>;

  // The value of `file` for memory: take() hands out the ciphertext. Otherwise `file` is a descriptor that
  // the caller keeps.
  static constexpr int kToMemory = -1;

  // Draws a salt and writes the header at the file's start. `hash` makes digests(); without it there are
  // none.
  SealedFileWriter(int file, const KeyBytes& key, Suite suite, std::span<const uint8_t> context,
                   std::string name, size_t threads, ChunkHash hash = {});

  // Seals the next bytes of the file. Full chunks are sealed from the caller's memory; a rest of less than a
  // chunk is kept until more comes. Other processes may write to the pieces' memory: a chunk then holds what
  // was there at some time during the call. Ciphertext is made in private memory.
  void write(std::span<const Plain> pieces);
  // Seals the last chunk and overwrites the key. Nothing can be written afterwards.
  void finish();

  // Returns the ciphertext made since the last call; only for kToMemory.
  std::vector<uint8_t> take();

  const Commitment& commitment() const { return key_.commitment; }
  uint64_t length() const;
  // The digests of all sealed chunks, one after the other; only after finish().
  std::vector<uint8_t> digests() const;

 private:
  void seal_full_chunks(std::span<const Plain> stream, size_t chunks);
  // Tells the kernel to start writing the blocks before chunk `end` to the disk.
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
  std::vector<uint8_t> rest_;  // plaintext after the last full chunk
  uint64_t sealed_chunks_ = 0;
  ChunkHash hash_;
  std::vector<uint8_t> digests_;
  std::vector<uint8_t> memory_;
  uint64_t memory_start_ = 0;  // the file's offset of memory_[0]
  enum class State { writing, finished, failed } state_ = State::writing;
};

}  // namespace sealring
