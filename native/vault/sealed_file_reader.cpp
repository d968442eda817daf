#include "vault/sealed_file_reader.hpp"

#include <openssl/crypto.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <system_error>
#include <utility>

#include "vault/parallel.hpp"
#include "vault/problem.hpp"

namespace sealring {
namespace {

constexpr uint8_t kNoAssociatedData = 0;
// Small enough to share the work among threads, large enough for few requests to a store.
constexpr size_t kCopiedAtOnce = size_t{2} << 20;

}  // namespace

struct SealedFileReader::Piece {
  uint64_t chunk;
  size_t inside;  // the piece's offset in the chunk
  size_t bytes;
  uint8_t* into;
};

struct SealedFileReader::Block {
  uint64_t first;
  size_t count;
  size_t piece;  // the first of the block's pieces
};

SealedFileReader::Source SealedFileReader::from_file(int file, const std::string& name) {
  return [file, name](uint64_t offset, uint8_t* into, size_t bytes) {
    while (bytes != 0) {
      const ssize_t done = ::pread(file, into, bytes, static_cast<off_t>(offset));
      if (done < 0 && errno == EINTR) continue;
      if (done < 0) {
        throw std::system_error(errno, std::generic_category(), name + " cannot be read");
      }
      if (done == 0) {
        throw SealedFileError(FileProblem::truncated,
                              name + " became shorter while it was read: restore it from a copy");
      }
      into += done;
      offset += static_cast<uint64_t>(done);
      bytes -= static_cast<size_t>(done);
    }
  };
}

SealedFileReader::SealedFileReader(Source source, uint64_t sealed_bytes, const KeyBytes& key,
                                   Suite suite, std::span<const uint8_t> context, std::string name,
                                   size_t threads)
    : source_(std::move(source)),
      sealed_bytes_(sealed_bytes),
      key_{},
      name_(std::move(name)),
      threads_(threads) {
  const auto length = plain_length(sealed_bytes);
  if (!length) {
    throw SealedFileError(FileProblem::truncated,
                          name_ + " was cut or extended: no sealed file has " +
                              std::to_string(sealed_bytes) + " bytes. Restore it from a copy");
  }
  length_ = *length;
  uint8_t header[kFileHeaderBytes];
  fetch(0, header, sizeof header);
  Salt salt;
  std::copy_n(header, kSaltBytes, salt.begin());
  key_ = derive_file_key(key, suite, salt, context);
  if (CRYPTO_memcmp(header + kSaltBytes, key_.commitment.data(), kCommitmentBytes) != 0) {
    throw SealedFileError(FileProblem::wrong_key,
                          name_ +
                              " was sealed under another key or as something else, or its first 56 "
                              "bytes were changed: use the key and the place it was sealed for");
  }
  verify(chunks() - 1, 1);
}

void SealedFileReader::expect(std::vector<uint8_t> digests, ChunkHash hash) {
  if (digests.size() / kDigestBytes != chunks() || digests.size() % kDigestBytes != 0) {
    throw SealedFileError(FileProblem::tampered,
                          name_ + ": the signed list has another number of chunks than the file");
  }
  expected_ = std::move(digests);
  hash_ = std::move(hash);
}

void SealedFileReader::close() {
  // In a forked child the key is already zeroed, and a thread of the parent may hold the lock.
  if (!key_.key.process().here()) return;
  const std::unique_lock<std::shared_mutex> alone(users_);
  closed_ = true;
  key_.key.wipe();
  key_.base = {};
}

std::shared_lock<std::shared_mutex> SealedFileReader::in_use() const {
  key_.key.process().require("this sealed file's key");
  std::shared_lock<std::shared_mutex> used(users_);
  if (closed_) throw SealedFileError(FileProblem::closed, name_ + " was closed: open it again");
  return used;
}

FileKey SealedFileReader::key() const {
  const auto used = in_use();
  return key_;
}

void SealedFileReader::read(std::span<const WantedRun> runs, Seen seen) {
  const auto used = in_use();
  std::vector<Piece> pieces;
  for (const WantedRun& run : runs) {
    if (run.offset > length_ || run.bytes > length_ - run.offset) {
      throw SealedFileError(FileProblem::out_of_range,
                            name_ + " holds " + std::to_string(length_) + " bytes, and " +
                                std::to_string(run.bytes) + " from " + std::to_string(run.offset) +
                                " on were asked for");
    }
    for (size_t done = 0; done < run.bytes;) {
      const uint64_t at = run.offset + done;
      const size_t inside = at % kChunkBytes;
      const size_t bytes = std::min(run.bytes - done, kChunkBytes - inside);
      pieces.push_back({at / kChunkBytes, inside, bytes, run.into + done});
      done += bytes;
    }
  }
  std::stable_sort(pieces.begin(), pieces.end(),
                   [](const Piece& a, const Piece& b) { return a.chunk < b.chunk; });
  std::vector<Block> blocks;
  for (size_t i = 0; i < pieces.size(); ++i) {
    const uint64_t chunk = pieces[i].chunk;
    if (!blocks.empty() && chunk < blocks.back().first + blocks.back().count) continue;
    if (!blocks.empty() && chunk == blocks.back().first + blocks.back().count &&
        blocks.back().count < kBlockChunks) {
      ++blocks.back().count;
    } else {
      blocks.push_back({chunk, 1, i});
    }
  }
  share_work(blocks.size(), threads_, [&](size_t number) {
    const Block& block = blocks[number];
    size_t next = block.piece;
    // With expected digests a chunk is not opened in the caller's memory: another thread of this process
    // could change it there before its digest is computed.
    const bool at_once = seen == Seen::by_this_process && expected_.empty();
    const auto target = [&](uint64_t chunk) {
      const bool whole = at_once && pieces[next].bytes == chunk_bytes(chunk);
      return whole ? pieces[next].into : nullptr;
    };
    open_chunks(block.first, block.count, target, [&](uint64_t chunk, const uint8_t* plain) {
      for (; next < pieces.size() && pieces[next].chunk == chunk; ++next) {
        const uint8_t* const from = plain + pieces[next].inside;
        if (pieces[next].into != from) std::memcpy(pieces[next].into, from, pieces[next].bytes);
      }
    });
  });
}

void SealedFileReader::copy_sealed(uint64_t offset, uint8_t* into, size_t bytes) {
  const auto used = in_use();
  if (offset > sealed_bytes_ || bytes > sealed_bytes_ - offset) {
    throw SealedFileError(FileProblem::out_of_range,
                          name_ + " has " + std::to_string(sealed_bytes_) + " bytes, and " +
                              std::to_string(bytes) + " from " + std::to_string(offset) +
                              " on were asked for");
  }
  fetch(offset, into, bytes);
}

uint64_t SealedFileReader::verify(uint64_t first, uint64_t count) {
  const auto used = in_use();
  const uint64_t end = first + std::min(count, chunks() - std::min(first, chunks()));
  const auto blocks = static_cast<size_t>((end - first + kBlockChunks - 1) / kBlockChunks);
  share_work(blocks, threads_, [&](size_t block) {
    const uint64_t start = first + block * kBlockChunks;
    open_chunks(
        start, static_cast<size_t>(std::min<uint64_t>(kBlockChunks, end - start)),
        [](uint64_t) { return nullptr; }, [](uint64_t, const uint8_t*) {});
  });
  return end;
}

void SealedFileReader::fetch(uint64_t offset, uint8_t* into, size_t bytes) {
  source_(offset, into, bytes);
  bytes_read_.fetch_add(bytes);
}

size_t SealedFileReader::chunk_bytes(uint64_t chunk) const {
  return chunk + 1 < chunks() ? kChunkBytes : length_ % kChunkBytes;
}

size_t SealedFileReader::as_expected(uint64_t first, const ChunkRow& chunks) const {
  uint8_t found[kBlockChunks * kDigestBytes];
  hash_(chunks, found);
  for (size_t i = 0; i < chunks.count; ++i) {
    const uint8_t* const wanted = expected_.data() + (first + i) * kDigestBytes;
    if (std::memcmp(found + i * kDigestBytes, wanted, kDigestBytes) != 0) return i;
  }
  return chunks.count;
}

void SealedFileReader::open_chunks(uint64_t first, size_t count, const Target& target,
                                   const Use& use) {
  thread_local std::vector<uint8_t> kept;
  Room room(kept, kBlockChunks * kSealedChunkBytes);
  const uint64_t end = chunk_offset(first + count - 1) + chunk_bytes(first + count - 1) + kTagBytes;
  fetch(chunk_offset(first), room.data(), static_cast<size_t>(end - chunk_offset(first)));
  uint8_t* plain[kBlockChunks];
  size_t good = 0;  // chunks that are authentic; later those that also have the expected digests
  {
    const Aead aead(key_.key, Aead::Direction::open, key_.suite);
    Aead::Use opening(aead);
    for (; good < count; ++good) {
      uint8_t* const chunk = room.data() + good * kSealedChunkBytes;
      const size_t bytes = chunk_bytes(first + good);
      uint8_t* const elsewhere = target(first + good);
      plain[good] = elsewhere != nullptr ? elsewhere : chunk;
      if (!opening.open(chunk_nonce(key_.base, first + good), {&kNoAssociatedData, 0}, chunk, bytes,
                        chunk + bytes, plain[good])) {
        OPENSSL_cleanse(plain[good], bytes);
        break;
      }
      if (expected_.empty()) use(first + good, plain[good]);
    }
  }
  const size_t authentic = good;
  if (!expected_.empty() && authentic != 0) {  // then all of them are in `room`
    good = as_expected(first, {.plain = room.data(),
                               .count = authentic,
                               .step = kSealedChunkBytes,
                               .last_bytes = chunk_bytes(first + authentic - 1)});
    for (size_t i = 0; i < good; ++i) use(first + i, plain[i]);
  }
  const uint64_t failed = good == count ? kMaxChunks : first + good;
  const bool other_bytes = good < authentic;
  OPENSSL_cleanse(room.data(), failed == kMaxChunks ? 0 : room.size());
  if (failed == kMaxChunks) return;
  if (other_bytes) {
    throw SealedFileError(FileProblem::tampered,
                          name_ + ": chunk " + std::to_string(failed) + " of " +
                              std::to_string(chunks()) +
                              " holds other bytes than its writer signed: a holder of the vault's "
                              "key changed it. Restore the file from a copy");
  }
  throw SealedFileError(
      FileProblem::tampered,
      name_ + ": chunk " + std::to_string(failed) + " of " + std::to_string(chunks()) +
          (failed + 1 == chunks() ? " (the last: the file may have been cut or extended)" : "") +
          " is not authentic: it was changed or exchanged. Restore the file from a copy");
}

void copy_sealed(std::span<const SealedRun> runs, size_t threads) {
  std::vector<SealedRun> pieces;
  for (const SealedRun& run : runs) {
    for (size_t done = 0; done < run.bytes; done += kCopiedAtOnce) {
      pieces.push_back({run.file, run.offset + done, std::min(kCopiedAtOnce, run.bytes - done),
                        run.into + done});
    }
  }
  share_work(pieces.size(), threads, [&](size_t number) {
    const SealedRun& piece = pieces[number];
    piece.file->copy_sealed(piece.offset, piece.into, piece.bytes);
  });
}

}  // namespace sealring
