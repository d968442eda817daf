// A record: a header with its own tag, a sealed payload, and the payload's tag (docs/spec.md).
//
// The header is authenticated by itself, before any of its fields is believed. So a changed length cannot
// make a reader wait for bytes that never come. And ranks that disagree learn it from an authentic header
// instead of from a tag that fails for no visible reason.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <span>

#include "keys/keys.hpp"

namespace sealring {

inline constexpr size_t kHeaderBytes = 64;
inline constexpr size_t kSealedHeaderBytes = kHeaderBytes + kTagBytes;
inline constexpr size_t kRecordOverhead = kSealedHeaderBytes + kTagBytes;
inline constexpr size_t kMaxPayload = 1u << 20;
inline constexpr size_t kGpuPayload = 256u << 10;  // the longest payload that a GPU seals
inline constexpr size_t kContextBytes = 32;
inline constexpr uint8_t kVersion = 1;
inline constexpr uint32_t kEveryone = 0xffffffffu;
inline constexpr uint32_t kHeaderLane = 0x80000000u;  // set in the lane of a header's nonce
// kCpuLane: sealed by a CPU with AES-256-GCM. kGpuLane: sealed by a GPU with ChaCha20-Poly1305. kWireLane and
// above: sealed by a GPU too, but the record on the link has no payload; that is in a slot of the sealer's
// area (wires.hpp).
inline constexpr uint32_t kCpuLane = 0, kGpuLane = 1, kWireLane = 256;
// A pair of ranks may have several pipes, each with its own keys. What CPUs seal for the first pipe has
// kCpuLane; for the other pipes it has the numbers from kFurtherLanes on.
inline constexpr uint32_t kFurtherLanes = 2;
inline constexpr size_t kMaxLanes = 64;
inline constexpr uint32_t cpu_lane(size_t lane) {
  return lane == 0 ? kCpuLane : kFurtherLanes + static_cast<uint32_t>(lane) - 1;
}
static_assert(cpu_lane(kMaxLanes) < kWireLane);

using Context = std::array<uint8_t, kContextBytes>;

enum class Kind : uint8_t {
  pair = 1,
  group = 2,
  alert = 3,
  bye = 4,
  // Messages from rank to rank (mailbox.hpp).
  announce = 5,
  accept = 6,
  data = 7,
  // Which collective a waiting rank is in (view.hpp).
  status = 8,
  // How many records the sender has fetched from the receiver's area (wires.hpp).
  fetched = 9,
};

struct Header {
  Kind kind = Kind::pair;
  uint32_t length = 0;
  uint64_t count = 0;
  uint32_t lane = 0;
  uint32_t generation = 0;
  uint32_t sender = 0;
  uint32_t receiver = 0;
  uint64_t collective = 0;
  uint8_t operation = 0;
  uint8_t dtype = 0;
  uint8_t reduction = 0;
  uint8_t algorithm = 0;
  uint32_t message = 0;
  uint32_t segment = 0;
  uint32_t root = 0;
  uint64_t total = 0;

  void encode(uint8_t* out) const;
  // Returns false for bytes that sealring never writes. Says nothing about authenticity.
  [[nodiscard]] static bool decode(const uint8_t* in, Header& header);
};

// A GPU seals a run of consecutive records at once: each with kGpuPayload bytes, the last with the rest.
inline size_t records_in_run(size_t length) {
  return length <= kGpuPayload ? 1 : (length + kGpuPayload - 1) / kGpuPayload;
}
inline size_t sealed_run_bytes(size_t length) {
  return length + records_in_run(length) * kRecordOverhead;
}

// The distance between the starts of two runs.
inline size_t run_stride(size_t length) { return (sealed_run_bytes(length) + 255) / 256 * 256; }

// Seals a header alone; its record is sealed elsewhere. The header's count and generation must be set.
void seal_header(SealingKey& key, const Context& context, const Header& header, uint8_t* out);

// Seals `plain` into out[0 .. kRecordOverhead + length). Fills in count and generation.
//
// `out` must be private memory: GCM may read back what it has just written, and a byte that another process
// changed in between would get a valid tag. `plain` may be memory that another process writes (a tensor in
// shared memory): whatever OpenSSL reads there becomes ciphertext in `out` first, and the tag covers that
// ciphertext. The record then holds what was in the tensor at some time during the call.
void seal_record(SealingKey& key, const Context& context, Header& header, const uint8_t* plain,
                 uint8_t* out);

// Checks the header's tag. `sealed` holds kSealedHeaderBytes.
[[nodiscard]] bool authentic_header(OpeningKey& key, const Context& context, const Header& header,
                                    const uint8_t* sealed);

// Opens the payload of a record whose header was found authentic. `record` and `plain` must be private
// memory: `record` may be read twice, and `plain` holds plaintext before its tag is checked. `plain` may be
// the place of the ciphertext itself.
[[nodiscard]] bool open_payload(OpeningKey& key, const Context& context, const Header& header,
                                const uint8_t* record, uint8_t* plain);

}  // namespace sealring
