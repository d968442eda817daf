// Mutations that know a script's lines and the fields of a record's header.
//
// libFuzzer's own mutations are used as well, on the whole input or within a line.
#include <algorithm>
#include <cstring>
#include <random>

#include "script.hpp"

extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t max_size);

namespace {

using namespace sealring;
using namespace sealring::fuzz;

struct Field {
  size_t at, bytes;
};
// Fields of the record's header (docs/spec.md), then of the line itself.
constexpr Field kFields[] = {
    {kHeaderAt + 3, 1},  {kHeaderAt + 4, 4},  {kHeaderAt + 8, 8},  {kHeaderAt + 16, 4},
    {kHeaderAt + 20, 4}, {kHeaderAt + 24, 4}, {kHeaderAt + 28, 4}, {kHeaderAt + 32, 8},
    {kHeaderAt + 40, 1}, {kHeaderAt + 41, 1}, {kHeaderAt + 42, 1}, {kHeaderAt + 43, 1},
    {kHeaderAt + 44, 4}, {kHeaderAt + 48, 4}, {kHeaderAt + 52, 4}, {kHeaderAt + 56, 8},
    {kPeerAt, 1},        {kFlagsAt, 1},       {kChangedAt, 2},     {kMaskAt, 1},
    {kFillAt, 1},        {kLengthAt, 2},      {kCutAt, 2},         {kReadAt, 1}};
// Limits of the protocol and of the harnesses, and their neighbours.
constexpr uint64_t kInteresting[] = {
    0,    1,    2,    3,    4,           5,           6,          7,          8,
    80,   96,   256,  257,  261,         262,         976,        1000,       1024,
    2000, 2048, 4096, 6000, kGpuPayload, kMaxPayload, 0x7fffffff, 0xffffffff, ~0ull};

}  // namespace

extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size,
                                          unsigned seed) {
  std::minstd_rand random(seed);
#ifndef SEALRING_FUZZ_PREFIX
#define SEALRING_FUZZ_PREFIX 0
#endif
  const size_t prefix = SEALRING_FUZZ_PREFIX;
  if (size < prefix + kLineBytes || random() % 4 == 0)
    return LLVMFuzzerMutate(data, size, max_size);
  uint8_t* const script = data + prefix;
  const size_t lines = (size - prefix) / kLineBytes;
  const auto line = [&](size_t index) { return script + index * kLineBytes; };
  uint8_t* const chosen = line(random() % lines);
  switch (random() % 7) {
    case 0: {  // a field takes an interesting value
      const Field& field = kFields[random() % std::size(kFields)];
      const uint64_t value = kInteresting[random() % std::size(kInteresting)];
      std::memcpy(chosen + field.at, &value, field.bytes);
      break;
    }
    case 1: {  // a field takes a value close to its old one
      const Field& field = kFields[random() % std::size(kFields)];
      uint64_t value = 0;
      std::memcpy(&value, chosen + field.at, field.bytes);
      value += static_cast<uint64_t>(static_cast<int64_t>(random() % 9) - 4);
      std::memcpy(chosen + field.at, &value, field.bytes);
      break;
    }
    case 2: {  // a field takes another line's value, so that records belong together
      const Field& field = kFields[random() % std::size(kFields)];
      std::memcpy(chosen + field.at, line(random() % lines) + field.at, field.bytes);
      break;
    }
    case 3: {  // two lines are exchanged
      uint8_t* const other = line(random() % lines);
      std::swap_ranges(chosen, chosen + kLineBytes, other);
      break;
    }
    case 4: {  // a line is repeated
      if (size + kLineBytes > max_size) break;
      std::memmove(chosen + kLineBytes, chosen, static_cast<size_t>(data + size - chosen));
      return size + kLineBytes;
    }
    case 5: {  // a line is removed
      std::memmove(chosen, chosen + kLineBytes,
                   static_cast<size_t>(data + size - chosen - kLineBytes));
      return size - kLineBytes;
    }
    default:
      LLVMFuzzerMutate(chosen, kLineBytes, kLineBytes);
  }
  return size;
}
