#include "handshake/frames.hpp"

#include <openssl/crypto.h>

#include <algorithm>

#include "keys/hexadecimal.hpp"

namespace sealring {

const Aead& FrameKey::aead() const {
  if (!aead_) throw std::logic_error("the connection's keys were wiped");
  return *aead_;
}

Nonce FrameKey::next_nonce() {
  Nonce nonce{};
  for (size_t i = 0; i < 8; ++i)
    nonce[nonce.size() - 1 - i] = static_cast<uint8_t>(count_ >> 8 * i);
  ++count_;
  return nonce;
}

size_t FrameSealer::sealed_size(size_t bytes) {
  const size_t frames = (bytes + kMostInAFrame - 1) / kMostInAFrame;
  return bytes + frames * (kFrameHeaderBytes + kTagBytes);
}

void FrameSealer::seal(std::span<const uint8_t> plain, uint8_t* out) {
  while (!plain.empty()) {
    const auto part = plain.first(std::min(plain.size(), kMostInAFrame));
    const size_t length = part.size() + kTagBytes;
    uint8_t* const header = out;
    out = std::ranges::copy(start_, out).out;
    *out++ = static_cast<uint8_t>(length >> 8);
    *out++ = static_cast<uint8_t>(length);
    key_.aead().seal(key_.next_nonce(), {header, kFrameHeaderBytes}, part.data(), part.size(), out,
                     out + part.size());
    out += length;
    plain = plain.subspan(part.size());
  }
}

std::span<uint8_t> FrameOpener::room() {
  key_.aead();  // throws if the key was wiped: what comes could not be opened
  return std::span(frame_).subspan(at_);
}

void FrameOpener::filled(size_t bytes) {
  at_ += bytes;
  if (length_ != 0 || at_ < kFrameHeaderBytes) return;
  const size_t length = size_t{frame_[3]} << 8 | frame_[4];
  if (!std::equal(start_.begin(), start_.end(), frame_.begin()) || length <= kTagBytes ||
      length > kMostInAFrame + kTagBytes) {
    wipe();
    throw MalformedFrame("what came is no frame: " + hexadecimal(frame_));
  }
  length_ = length;
  frame_.resize(kFrameHeaderBytes + length);
}

void FrameOpener::open(uint8_t* plain) {
  if (!whole()) throw std::logic_error("the frame is not whole");
  const size_t size = plain_size();
  const uint8_t* const cipher = frame_.data() + kFrameHeaderBytes;
  const bool good = key_.aead().open(key_.next_nonce(), {frame_.data(), kFrameHeaderBytes}, cipher,
                                     size, cipher + size, plain);
  if (!good) {
    OPENSSL_cleanse(plain, size);
    wipe();
    throw MalformedFrame("a set-up message was changed on its way");
  }
  frame_.resize(kFrameHeaderBytes);
  at_ = length_ = 0;
}

}  // namespace sealring
