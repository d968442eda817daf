// Reads any bytes of a sealed file, and gives out only authentic ones.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <shared_mutex>
#include <span>
#include <string>
#include <vector>

#include "vault/chunks.hpp"

namespace sealring {

// A range of the plaintext, and the memory to read it into.
struct WantedRun {
  uint64_t offset;
  size_t bytes;
  uint8_t* into;
};

// Who can see the memory that is read into. If no other process can, a whole chunk is opened directly there.
// Otherwise it is opened in private memory and copied, so that bytes which fail their check are never there.
enum class Seen { by_others, by_this_process };

class SealedFileReader {
 public:
  // Copies `bytes` of the file, from `offset` on, into private memory. Several threads may call it.
  using Source = std::function<void(uint64_t offset, uint8_t* into, size_t bytes)>;

  // Makes a source that reads a file descriptor, which the caller keeps.
  static Source from_file(int file, const std::string& name);

  // Checks the commitment, and checks the length by opening the last chunk.
  SealedFileReader(Source source, uint64_t sealed_bytes, const KeyBytes& key, Suite suite,
                   std::span<const uint8_t> context, std::string name, size_t threads);

  // From now on a chunk whose plaintext's digest is not the one in this list is refused like a chunk that is
  // not authentic: a holder of the key sealed other bytes than the list's signer signed.
  void expect(std::vector<uint8_t> digests, ChunkHash hash);

  // Reads every chunk that has wanted bytes once, opens it, and copies out the wanted bytes. Runs may
  // overlap. If it throws, some runs may have been filled, but only with authentic bytes: what was opened in
  // its place and failed is overwritten.
  void read(std::span<const WantedRun> runs, Seen seen = Seen::by_others);
  // Copies bytes of the sealed file without opening them, for a device that opens them itself. Several
  // threads may call it.
  void copy_sealed(uint64_t offset, uint8_t* into, size_t bytes);
  // Checks at most `count` chunks from `first` on without keeping their plaintext. Returns the next chunk to
  // check.
  uint64_t verify(uint64_t first, uint64_t count);

  // Waits for the reads under way, then overwrites the key. Later reads are refused.
  void close();

  uint64_t length() const { return length_; }
  uint64_t chunks() const { return length_ / kChunkBytes + 1; }
  const Commitment& commitment() const { return key_.commitment; }
  // The file's key, for a device that opens chunks itself.
  FileKey key() const;
  // How many bytes of the sealed file were read, including its header.
  uint64_t bytes_read() const { return bytes_read_.load(); }

 private:
  struct Piece;  // the part of one chunk that one run wants
  struct Block;  // consecutive chunks that are read together
  using Use = std::function<void(uint64_t chunk, const uint8_t* plain)>;
  // The memory in which to open a chunk; null: where its ciphertext is.
  using Target = std::function<uint8_t*(uint64_t chunk)>;

  // Makes close() wait while the lock is held. Throws if the file is closed.
  std::shared_lock<std::shared_mutex> in_use() const;
  void fetch(uint64_t offset, uint8_t* into, size_t bytes);
  size_t chunk_bytes(uint64_t chunk) const;
  // How many chunks from `first` on have the expected digests; counts up to the first that has not.
  size_t as_expected(uint64_t first, const ChunkRow& chunks) const;
  void open_chunks(uint64_t first, size_t count, const Target& target, const Use& use);

  Source source_;
  uint64_t sealed_bytes_;
  uint64_t length_ = 0;
  FileKey key_;
  mutable std::shared_mutex users_;
  bool closed_ = false;
  std::string name_;
  size_t threads_;
  std::vector<uint8_t> expected_;  // digests of all chunks, or empty
  ChunkHash hash_;  // the function that makes the digests
  std::atomic<uint64_t> bytes_read_{0};
};

// A range of a sealed file's bytes, not opened, and the memory to copy it into.
struct SealedRun {
  SealedFileReader* file;
  uint64_t offset;
  size_t bytes;
  uint8_t* into;
};

// Copies all runs with at most `threads` threads, because one thread copies from the page cache slower than a
// GPU takes the bytes. If it throws, some runs may have been copied.
void copy_sealed(std::span<const SealedRun> runs, size_t threads);

}  // namespace sealring
