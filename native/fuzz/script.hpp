// Reads a fuzzer's input as a script: the records that a peer, or an attacker on the wire, sends to us.
//
// Every line of the script has kLineBytes bytes and gives one record. By default the record is sealed as the
// protocol demands, with the next count of its key, because random bytes alone would never pass the first tag
// check. A line can ask for a wrong key, count, generation, length or sender (what a hostile member of the
// group can make), for a changed byte or a cut (what the network can make), and for small reads.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <span>
#include <tuple>
#include <vector>

#include "record/record.hpp"
#include "tests/two_ends.hpp"

namespace sealring::fuzz {

inline constexpr size_t kLineBytes = 80;
inline constexpr size_t kMaxLines = 32;
inline constexpr size_t kMaxScriptPayload = 4096;

// The places of a line's fields. The mutator (mutator.cpp) uses the same places.
enum At : size_t {
  kPeerAt = 0,
  kFlagsAt = 1,
  kChangedAt = 2,  // two bytes: which byte of the record is changed
  kMaskAt = 4,  // the mask that changes it; 0 changes nothing
  kFillAt = 5,  // the byte that fills the payload
  kLengthAt = 6,  // two bytes: the payload's length
  kHeaderAt = 8,
  kCutAt = 72,  // two bytes: the record ends here; 0 keeps it whole
  kReadAt = 74,  // the most bytes that one read returns; 0 for no limit
};

enum Flag : uint8_t {
  kWrongKey = 1,
  kNextGeneration = 2,
  kOwnCount = 4,  // the count is the header's own, not the next one
  kOwnLength = 8,  // the length is the header's own, not the payload's
  kOwnSender = 16,  // sender and receiver are the header's own
  kOwnGeneration = 32,
  kKeepSpelling = 64,  // the header's bytes are kept, including magic number and version
};

struct Line {
  explicit Line(const uint8_t* bytes) : bytes(bytes) {}
  bool has(Flag flag) const { return bytes[kFlagsAt] & flag; }
  uint16_t word(size_t at) const { return static_cast<uint16_t>(bytes[at] | bytes[at + 1] << 8); }
  size_t length() const { return word(kLengthAt) % (kMaxScriptPayload + 1); }
  uint8_t fill() const { return bytes[kFillAt]; }
  const uint8_t* bytes;
};

inline std::vector<Line> lines_of(std::span<const uint8_t> script) {
  std::vector<Line> out;
  for (size_t at = 0; at + kLineBytes <= script.size() && out.size() < kMaxLines;
       at += kLineBytes) {
    out.emplace_back(script.data() + at);
  }
  return out;
}

// One record as it comes over the wire, and whether the protocol allows its use.
struct Sent {
  Header header;
  std::vector<uint8_t> plain;
  std::vector<uint8_t> bytes;
  size_t most_per_read;
  bool authentic;  // sealed with the right key, and unchanged
  bool in_order;  // the next count of its key
};

// Makes the records that `peer` sends to `rank` in a group of `world`.
class Sealer {
 public:
  Sealer(int rank, int world) : rank_(rank), world_(world) {}

  Sent seal(const Line& line, int peer) {
    Sent sent{};
    sent.most_per_read = line.bytes[kReadAt] == 0 ? SIZE_MAX : line.bytes[kReadAt];
    std::array<uint8_t, kHeaderBytes> spelled;
    std::memcpy(spelled.data(), line.bytes + kHeaderAt, kHeaderBytes);
    const bool readable = line.has(kKeepSpelling) && Header::decode(spelled.data(), sent.header);
    if (!line.has(kKeepSpelling)) sent.header = loosely_decoded(spelled);
    Header& header = sent.header;
    const size_t length = line.length();
    sent.plain.assign(length, line.fill());
    if (!line.has(kOwnLength)) header.length = static_cast<uint32_t>(length);
    const bool published = header.kind == Kind::group;
    if (!line.has(kOwnSender)) {
      // A published record may be another member's, forwarded by this peer.
      header.sender =
          published ? header.sender % static_cast<uint32_t>(world_) : static_cast<uint32_t>(peer);
      header.receiver = published ? kEveryone : static_cast<uint32_t>(rank_);
    }
    Chain& chain = chain_of(header, peer);
    uint32_t generation = chain.generation;
    if (line.has(kNextGeneration)) ++generation;
    if (!line.has(kOwnGeneration)) header.generation = generation;
    if (!line.has(kOwnCount)) header.count = chain.count;
    sent.in_order = header.count == chain.count && header.generation == generation;
    if (line.has(kKeepSpelling) && !readable) {
      sent.bytes.assign(spelled.begin(), spelled.end());
    } else {
      sent.bytes.resize(kHeaderBytes);
      header.encode(sent.bytes.data());
    }
    seal_with(line, chain, generation, sent);
    sent.authentic = !line.has(kWrongKey) && (readable || !line.has(kKeepSpelling)) &&
                     header.length == length && header.generation == generation;
    change(line, sent);
    if (sent.authentic && sent.in_order) {
      ++chain.count;
      chain.generation = generation;
    }
    return sent;
  }

 private:
  // The counters that both ends keep for one key.
  struct Chain {
    KeyBytes first;
    Suite suite;
    uint32_t generation = 0;
    uint64_t count = 0;
  };

  static Header loosely_decoded(std::array<uint8_t, kHeaderBytes>& bytes) {
    bytes[0] = 'S', bytes[1] = 'R', bytes[2] = kVersion;
    bytes[3] = static_cast<uint8_t>(1 + bytes[3] % 9);
    bytes[6] &= 0x0f, bytes[7] = 0, bytes[19] &= 0x7f;
    Header header;
    (void)Header::decode(bytes.data(), header);
    return header;
  }

  Chain& chain_of(const Header& header, int peer) {
    const bool by_gpu = header.lane != kCpuLane;
    const bool published = header.kind == Kind::group;
    const int owner = published ? static_cast<int>(header.sender) : peer;
    const auto [found, added] = chains_.try_emplace({published, by_gpu, owner});
    if (added) {
      const KeyBytes key = published ? testing::group_key(owner) : testing::pair_key(owner, rank_);
      found->second.first = by_gpu ? gpu_key(key) : key;
      found->second.suite = by_gpu ? Suite::chacha20_poly1305 : Suite::aes_256_gcm;
    }
    return found->second;
  }

  static void seal_with(const Line& line, const Chain& chain, uint32_t generation, Sent& sent) {
    KeyBytes key = chain.first;
    // Only a hostile member claims a wrong generation, and that costs at most one step.
    for (uint32_t step = 0; step < generation; ++step) key = ratchet(key);
    if (line.has(kWrongKey)) key[31] ^= 1;
    Aead aead(key, Aead::Direction::seal, chain.suite);
    const Header& header = sent.header;
    std::array<uint8_t, kHeaderBytes + kContextBytes> associated{};
    std::memcpy(associated.data(), sent.bytes.data(), kHeaderBytes);
    sent.bytes.resize(kRecordOverhead + sent.plain.size());
    aead.seal(make_nonce(header.lane | kHeaderLane, header.count), associated, nullptr, 0, nullptr,
              sent.bytes.data() + kHeaderBytes);
    uint8_t* const payload = sent.bytes.data() + kSealedHeaderBytes;
    aead.seal(make_nonce(header.lane, header.count), associated, sent.plain.data(),
              sent.plain.size(), payload, payload + sent.plain.size());
  }

  static void change(const Line& line, Sent& sent) {
    if (line.bytes[kMaskAt] != 0) {
      sent.bytes[line.word(kChangedAt) % sent.bytes.size()] ^= line.bytes[kMaskAt];
      sent.authentic = false;
    }
    const size_t cut = line.word(kCutAt);
    if (cut != 0 && cut < sent.bytes.size()) {
      sent.bytes.resize(cut);
      sent.authentic = false;
    }
  }

  const int rank_;
  const int world_;
  std::map<std::tuple<bool, bool, int>, Chain> chains_;
};

// A pipe whose other end has written a script's records and then left. If there is no record, the other end
// stays and is silent.
class ScriptedPipe final : public Pipe {
 public:
  void add(const Sent& sent) {
    if (sent.bytes.empty()) return;
    chunks_.push_back({sent.bytes, sent.most_per_read});
  }

  size_t read(std::span<iovec> into) override {
    if (chunks_.empty()) return 0;
    if (next_ == chunks_.size()) throw PipeEnded("the script is at its end");
    size_t total = 0;
    const Chunk& chunk = chunks_[next_];
    for (const iovec& part : into) {
      const size_t n = std::min({part.iov_len, chunk.bytes.size() - done_, chunk.most - total});
      std::memcpy(part.iov_base, chunk.bytes.data() + done_, n);
      done_ += n;
      total += n;
      if (n < part.iov_len) break;
    }
    if (done_ == chunk.bytes.size()) ++next_, done_ = 0;
    return total;
  }
  size_t write(std::span<iovec> from) override {
    size_t bytes = 0;
    for (const iovec& part : from) bytes += part.iov_len;
    return bytes;
  }
  bool arm(bool, bool) override { return false; }
  void disarm() override {}
  short poll_events(bool, bool) const override { return 0; }
  int socket() const override { return -1; }
  void end_writing() override {}
  bool delivered() const override { return true; }
  size_t memory_bytes() const override { return 0; }

 private:
  struct Chunk {
    std::vector<uint8_t> bytes;
    size_t most;
  };
  std::vector<Chunk> chunks_;
  size_t next_ = 0;
  size_t done_ = 0;
};

// Ends the process, so that the fuzzer keeps the input.
inline void require(bool good) {
  if (!good) std::abort();
}

}  // namespace sealring::fuzz
