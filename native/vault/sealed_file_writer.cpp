#include "vault/sealed_file_writer.hpp"

#include <fcntl.h>
#include <openssl/rand.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

#include "vault/parallel.hpp"
#include "vault/problem.hpp"

namespace sealring {
namespace {

constexpr size_t kWriteBackBlocks = 16;  // 4 MiB: less is not worth a call
constexpr uint8_t kNoAssociatedData = 0;

Salt random_salt() {
  Salt salt;
  const NoFork no_fork;
  if (RAND_bytes(salt.data(), static_cast<int>(salt.size())) != 1) {
    throw std::runtime_error("OpenSSL has no random bytes");
  }
  return salt;
}

void write_whole(int file, uint64_t offset, const uint8_t* bytes, size_t count,
                 const std::string& name) {
  while (count != 0) {
    const ssize_t done = ::pwrite(file, bytes, count, static_cast<off_t>(offset));
    if (done < 0 && errno == EINTR) continue;
    if (done <= 0) {
      throw std::system_error(done < 0 ? errno : ENOSPC, std::generic_category(),
                              name + " cannot be written");
    }
    bytes += done;
    offset += static_cast<uint64_t>(done);
    count -= static_cast<size_t>(done);
  }
}

// Makes a sequence of pieces look like one stream of bytes.
class Stream {
 public:
  explicit Stream(std::span<const SealedFileWriter::Plain> pieces) : pieces_(pieces) {
    starts_.reserve(pieces.size());
    for (const auto& piece : pieces) {
      starts_.push_back(total_);
      total_ += piece.size();
    }
  }

  // Returns `bytes` of the stream from `offset` on: in place if they are in one piece, else gathered in
  // `room`.
  const uint8_t* at(size_t offset, size_t bytes, uint8_t* room) const {
    auto index = static_cast<size_t>(std::upper_bound(starts_.begin(), starts_.end(), offset) -
                                     starts_.begin() - 1);
    size_t inside = offset - starts_[index];
    if (pieces_[index].size() - inside >= bytes) return pieces_[index].data() + inside;
    for (size_t done = 0; done < bytes; ++index, inside = 0) {
      const size_t part = std::min(bytes - done, pieces_[index].size() - inside);
      if (part != 0) std::memcpy(room + done, pieces_[index].data() + inside, part);
      done += part;
    }
    return room;
  }

  size_t total() const { return total_; }

 private:
  std::span<const SealedFileWriter::Plain> pieces_;
  std::vector<size_t> starts_;
  size_t total_ = 0;
};

}  // namespace

SealedFileWriter::SealedFileWriter(int file, const KeyBytes& key, Suite suite,
                                   std::span<const uint8_t> context, std::string name,
                                   size_t threads, ChunkHash hash)
    : file_(file), key_{}, name_(std::move(name)), threads_(threads), hash_(std::move(hash)) {
  const Salt salt = random_salt();
  key_ = derive_file_key(key, suite, salt, context);
  rest_.reserve(kChunkBytes);
  put(0, salt.data(), salt.size());
  put(kSaltBytes, key_.commitment.data(), key_.commitment.size());
}

void SealedFileWriter::require_usable() const {
  if (state_ == State::failed) throw std::logic_error(name_ + ": writing failed before");
  if (state_ == State::finished) throw std::logic_error(name_ + " is finished");
}

uint64_t SealedFileWriter::length() const {
  const std::lock_guard<std::mutex> lock(lock_);
  return sealed_chunks_ * kChunkBytes + rest_.size();
}

std::vector<uint8_t> SealedFileWriter::digests() const {
  const std::lock_guard<std::mutex> lock(lock_);
  if (state_ != State::finished) throw std::logic_error(name_ + " is not finished");
  return digests_;
}

void SealedFileWriter::write(std::span<const Plain> pieces) {
  const std::lock_guard<std::mutex> lock(lock_);
  require_usable();
  state_ = State::failed;  // until this call has succeeded
  std::vector<Plain> stream;
  stream.reserve(pieces.size() + 1);
  stream.emplace_back(rest_);
  // Empty pieces are left out, so that every offset is in a piece that has bytes there.
  for (const Plain& piece : pieces) {
    if (!piece.empty()) stream.push_back(piece);
  }
  if (rest_.empty()) stream.erase(stream.begin());
  const Stream whole(stream);
  const size_t chunks = whole.total() / kChunkBytes;
  if (sealed_chunks_ + chunks >= kMaxChunks) {
    throw SealedFileError(FileProblem::too_long, name_ + " would be longer than 4 PiB");
  }
  seal_full_chunks(stream, chunks);
  const size_t left = whole.total() - chunks * kChunkBytes;
  std::vector<uint8_t> rest(left);
  if (left != 0) {
    const uint8_t* const from = whole.at(chunks * kChunkBytes, left, rest.data());
    if (from != rest.data()) std::memcpy(rest.data(), from, left);
  }
  rest_ = std::move(rest);
  sealed_chunks_ += chunks;
  state_ = State::writing;
}

void SealedFileWriter::finish() {
  const std::lock_guard<std::mutex> lock(lock_);
  require_usable();
  state_ = State::failed;
  uint8_t sealed[kSealedChunkBytes];
  if (hash_) {
    digests_.resize((sealed_chunks_ + 1) * kDigestBytes);
    hash_({.plain = rest_.data(), .count = 1, .step = kChunkBytes, .last_bytes = rest_.size()},
          digests_.data() + sealed_chunks_ * kDigestBytes);
  }
  {
    const Aead aead(key_.key, Aead::Direction::seal, key_.suite);
    Aead::Use use(aead);
    seal_chunk(use, sealed_chunks_, rest_.data(), rest_.size(), sealed);
  }
  key_.key.wipe();
  put(chunk_offset(sealed_chunks_), sealed, rest_.size() + kTagBytes);
  state_ = State::finished;
}

std::vector<uint8_t> SealedFileWriter::take() {
  const std::lock_guard<std::mutex> lock(lock_);
  memory_start_ += memory_.size();
  return std::exchange(memory_, {});
}

void SealedFileWriter::seal_full_chunks(std::span<const Plain> stream, size_t chunks) {
  const Stream whole(stream);
  if (file_ == kToMemory) {
    memory_.resize(chunk_offset(sealed_chunks_ + chunks) - memory_start_);
  }
  if (hash_) digests_.resize((sealed_chunks_ + chunks) * kDigestBytes);
  const size_t blocks = (chunks + kBlockChunks - 1) / kBlockChunks;
  share_work(blocks, threads_, [&](size_t block) {
    thread_local std::vector<uint8_t> kept[2];
    Room sealed(kept[0], kBlockChunks * kSealedChunkBytes);
    Room gathered(kept[1], kBlockChunks * kChunkBytes);
    const size_t first = block * kBlockChunks;
    const size_t count = std::min(kBlockChunks, chunks - first);
    {
      const Aead aead(key_.key, Aead::Direction::seal, key_.suite);
      Aead::Use use(aead);
      for (size_t i = 0; i < count; ++i) {
        uint8_t* const own = gathered.data() + i * kChunkBytes;
        const uint8_t* plain = whole.at((first + i) * kChunkBytes, kChunkBytes, own);
        if (hash_ && plain != own) {
          // Others may write to the caller's memory, so a private copy is both sealed and hashed.
          std::memcpy(own, plain, kChunkBytes);
          plain = own;
        }
        seal_chunk(use, sealed_chunks_ + first + i, plain, kChunkBytes,
                   sealed.data() + i * kSealedChunkBytes);
      }
    }
    put(chunk_offset(sealed_chunks_ + first), sealed.data(), count * kSealedChunkBytes);
    if (hash_) {
      hash_({.plain = gathered.data(),
             .count = count,
             .step = kChunkBytes,
             .last_bytes = kChunkBytes},
            digests_.data() + (sealed_chunks_ + first) * kDigestBytes);
    }
    if ((block + 1) % kWriteBackBlocks == 0) start_writing_back(sealed_chunks_ + first + count);
  });
}

void SealedFileWriter::start_writing_back(uint64_t end) const {
  if (file_ == kToMemory) return;
  // Lets the disk work while the next blocks are sealed. The call may wait for the disk's queue; only one
  // block's thread makes it, and the other threads go on. It is only a hint: fsync reports failures, and
  // writes what was not written yet.
  const uint64_t chunks = kWriteBackBlocks * kBlockChunks;
  ::sync_file_range(file_, static_cast<off_t>(chunk_offset(end - chunks)),
                    static_cast<off_t>(chunks * kSealedChunkBytes), SYNC_FILE_RANGE_WRITE);
}

void SealedFileWriter::seal_chunk(Aead::Use& use, uint64_t number, const uint8_t* plain,
                                  size_t bytes, uint8_t* out) const {
  use.seal(chunk_nonce(key_.base, number), {&kNoAssociatedData, 0}, plain, bytes, out, out + bytes);
}

void SealedFileWriter::put(uint64_t offset, const uint8_t* bytes, size_t count) {
  if (file_ != kToMemory) {
    write_whole(file_, offset, bytes, count, name_);
    return;
  }
  const uint64_t at = offset - memory_start_;
  if (memory_.size() < at + count) memory_.resize(at + count);
  std::memcpy(memory_.data() + at, bytes, count);
}

}  // namespace sealring
