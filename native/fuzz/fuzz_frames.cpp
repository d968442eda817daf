// Reads any bytes as frames: only sealed frames open. Sealed bytes come back, however they are cut, but not
// after one bit was changed.
#include "handshake/frames.hpp"

#include "script.hpp"

using namespace sealring;

namespace {

constexpr FrameStart kStart = {31, 0, 2};

KeyBytes some_key() {
  KeyBytes key;
  key.fill(7);
  return key;
}

// Returns what was opened until something was refused or bytes were missing.
std::vector<uint8_t> opened(std::span<const uint8_t> raw, size_t at_once, bool& refused) {
  FrameOpener opener(some_key(), kStart);
  std::vector<uint8_t> plain;
  refused = false;
  try {
    while (!raw.empty()) {
      const std::span<uint8_t> room = opener.room();
      fuzz::require(!room.empty());
      const size_t count = std::min({room.size(), raw.size(), at_once});
      std::copy_n(raw.begin(), count, room.begin());
      opener.filled(count);
      raw = raw.subspan(count);
      if (!opener.whole()) continue;
      const size_t before = plain.size();
      plain.resize(before + opener.plain_size());
      opener.open(plain.data() + before);
    }
  } catch (const MalformedFrame&) {
    refused = true;
  }
  return plain;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 2) return 0;
  const size_t at_once = 1 + data[0] % 64;
  const std::span<const uint8_t> bytes(data + 1, size - 1);
  bool refused = false;
  for (const uint8_t each : opened(bytes, at_once, refused)) fuzz::require(each == 0);

  std::vector<uint8_t> sealed(FrameSealer::sealed_size(bytes.size()));
  FrameSealer(some_key(), kStart).seal(bytes, sealed.data());
  const std::vector<uint8_t> back = opened(sealed, at_once, refused);
  fuzz::require(!refused && std::equal(back.begin(), back.end(), bytes.begin(), bytes.end()));

  const size_t changed = (size_t{data[0]} << 8 | data[1]) % sealed.size();
  sealed[changed] ^= static_cast<uint8_t>(1 << data[0] % 8);
  const std::vector<uint8_t> other = opened(sealed, at_once, refused);
  fuzz::require(refused || other.size() < bytes.size());
  return 0;
}
