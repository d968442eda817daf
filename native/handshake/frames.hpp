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

using FrameStart = std::array<uint8_t, 3>;  // how every frame begins: type and version

// Bytes that are no frame, or not one that the peer sealed.
struct MalformedFrame : std::runtime_error {
  explicit MalformedFrame(const std::string& what) : std::runtime_error(what) {}
};

// A key in one direction, and the number of its next frame: no number is used twice, and none at all in a
// forked child.
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
  // As many frames as the bytes need, one behind the other.
  static size_t sealed_size(size_t bytes);
  void seal(std::span<const uint8_t> plain, uint8_t* out);
  void wipe() { key_.wipe(); }

 private:
  FrameKey key_;
  FrameStart start_;
};

// One frame after the other. It never asks for a byte behind the frame that is coming: records may follow.
// After a frame that is malformed it opens no other one.
class FrameOpener {
 public:
  FrameOpener(const KeyBytes& key, const FrameStart& start)
      : key_(key, Aead::Direction::open), start_(start) {}

  // Where the next bytes belong, and how many at most. Never empty while the frame is not whole.
  std::span<uint8_t> room();
  // So many bytes were written there. Throws MalformedFrame where they are no header.
  void filled(size_t bytes);
  bool whole() const { return length_ != 0 && at_ == kFrameHeaderBytes + length_; }
  size_t plain_size() const { return length_ - kTagBytes; }
  // Writes plain_size() bytes of a whole frame, and begins the next one. Throws MalformedFrame, and leaves
  // zeros, where the tag does not match.
  void open(uint8_t* plain);
  void wipe() { key_.wipe(); }

 private:
  FrameKey key_;
  FrameStart start_;
  std::vector<uint8_t> frame_ = std::vector<uint8_t>(kFrameHeaderBytes);
  size_t at_ = 0;  // bytes of it that have come
  size_t length_ = 0;  // as its header says, once that has come
};

}  // namespace sealring
