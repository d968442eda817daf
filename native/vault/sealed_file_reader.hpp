// Reads any bytes of a sealed file. Nothing is given out that was not found authentic.
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

// Bytes of the plaintext, and where they are wanted.
struct WantedRun {
  uint64_t offset;
  size_t bytes;
  uint8_t* into;
};

// Who can see the memory that is read into. Where no other process can, a whole chunk is opened there at
// once; elsewhere it is opened apart and copied, so that bytes that fail their check are never there.
enum class Seen { by_others, by_this_process };

class SealedFileReader {
 public:
  // Copies `bytes` of the file from `offset` on into private memory. May be called by several threads.
  using Source = std::function<void(uint64_t offset, uint8_t* into, size_t bytes)>;

  // Reads from a file descriptor, which stays the caller's.
  static Source from_file(int file, const std::string& name);

  // Checks the commitment, and the length by opening the last chunk.
  SealedFileReader(Source source, uint64_t sealed_bytes, const KeyBytes& key, Suite suite,
                   std::span<const uint8_t> context, std::string name, size_t threads);

  // From now on a chunk whose plaintext has another digest than this list says is refused like one
  // that is not authentic: a holder of the key sealed other bytes than the signer of the list.
  void expect(std::vector<uint8_t> digests, ChunkHash hash);

  // Reads every chunk that holds wanted bytes once, opens it in private memory and copies out what is
  // wanted of it. Runs may overlap. If it throws, some runs may have been filled; never with bytes that
  // are not authentic: what was opened in its place and failed is overwritten.
  void read(std::span<const WantedRun> runs, Seen seen = Seen::by_others);
  // Copies bytes of the sealed file as they are, for a device that opens them itself. May be called by
  // several threads.
  void copy_sealed(uint64_t offset, uint8_t* into, size_t bytes);
  // Opens all chunks from `first` on, at most `count`, and keeps nothing. Returns the next to check.
  uint64_t verify(uint64_t first, uint64_t count);

  // Overwrites the key, once the reads that are under way have ended. Every later one is refused.
  void close();

  uint64_t length() const { return length_; }
  uint64_t chunks() const { return length_ / kChunkBytes + 1; }
  const Commitment& commitment() const { return key_.commitment; }
  // For a device that opens chunks by itself.
  FileKey key() const;
  // Bytes of the sealed file that were read, its header included.
  uint64_t bytes_read() const { return bytes_read_.load(); }

 private:
  struct Piece;  // what one run wants of one chunk
  struct Block;  // chunks that lie behind each other and are read together
  using Use = std::function<void(uint64_t chunk, const uint8_t* plain)>;
  // Where a chunk is to be opened; null for the room that its ciphertext is in.
  using Target = std::function<uint8_t*(uint64_t chunk)>;

  // Keeps close() waiting.
  std::shared_lock<std::shared_mutex> in_use() const;
  void fetch(uint64_t offset, uint8_t* into, size_t bytes);
  size_t chunk_bytes(uint64_t chunk) const;
  // How many of the chunks from `first` on have the digests that are expected, up to one that has not.
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
  ChunkHash hash_;                 // what they are made with
  std::atomic<uint64_t> bytes_read_{0};
};

// Bytes of a sealed file as they are, and where they are wanted.
struct SealedRun {
  SealedFileReader* file;
  uint64_t offset;
  size_t bytes;
  uint8_t* into;
};

// Copies all of them, by at most `threads` threads: one alone copies from the page cache slower than a
// GPU takes it. If it throws, some may have been copied.
void copy_sealed(std::span<const SealedRun> runs, size_t threads);

}  // namespace sealring
