// The frames in which set-up messages travel under a session (docs/spec.md, section 3): type, version and
// length, then ciphertext and tag. The header is associated data, and the nonce is the frame's number.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "keys/keys.hpp"

namespace sealring {

inline constexpr size_t kFrameHeaderBytes = 5;
inline constexpr size_t kMostInAFrame = 16 << 10;  // plaintext

using FrameStart = std::array<uint8_t, 3>;  // the start of every frame: type and version

// Thrown for bytes that are no frame, or no frame that the peer sealed.
struct MalformedFrame : std::runtime_error {
  explicit MalformedFrame(const std::string& what) : std::runtime_error(what) {}
};

// A key for one direction, and the number of its next frame. No number is used twice, and a forked child can
// use none.
class FrameKey {
 public:
  FrameKey(const KeyBytes& key, Aead::Direction direction) : aead_(std::in_place, key, direction) {}
  // Throws std::logic_error after `wipe`.
  const Aead& aead() const;
  Nonce next_nonce();
  void wipe() { aead_.reset(); }

 private:
  std::optional<Aead> aead_;
  uint64_t count_ = 0;
};

class FrameSealer {
 public:
  FrameSealer(const KeyBytes& key, const FrameStart& start)
      : key_(key, Aead::Direction::seal), start_(start) {}
  // The size of the bytes sealed in as many frames as they need.
  static size_t sealed_size(size_t bytes);
  void seal(std::span<const uint8_t> plain, uint8_t* out);
  void wipe() { key_.wipe(); }

 private:
  FrameKey key_;
  FrameStart start_;
};

// Opens one frame after the other. It never asks for a byte after the current frame, because records may
// follow. After a malformed frame it opens no other.
class FrameOpener {
 public:
  FrameOpener(const KeyBytes& key, const FrameStart& start)
      : key_(key, Aead::Direction::open), start_(start) {}

  // Where the next bytes must be written, and how many at most. Never empty while the frame is not whole.
  std::span<uint8_t> room();
  // Says that so many bytes were written to room(). Throws MalformedFrame if they are no valid header.
  void filled(size_t bytes);
  bool whole() const { return length_ != 0 && at_ == kFrameHeaderBytes + length_; }
  size_t plain_size() const { return length_ - kTagBytes; }
  // Writes the plain_size() bytes of a whole frame to `plain`, and begins the next frame. If the tag does not
  // match, throws MalformedFrame and fills `plain` with zeros.
  void open(uint8_t* plain);
  void wipe() { key_.wipe(); }

 private:
  FrameKey key_;
  FrameStart start_;
  std::vector<uint8_t> frame_ = std::vector<uint8_t>(kFrameHeaderBytes);
  size_t at_ = 0;  // bytes of the frame that have come
  size_t length_ = 0;  // the frame's length according to its header; 0 until the header has come
};

}  // namespace sealring
