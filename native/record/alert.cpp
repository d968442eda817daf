#include "record/alert.hpp"

#include <algorithm>

namespace sealring {
namespace {

// code (1), about (4), seen by (4), collective (8), text; little-endian.
constexpr size_t kFixedBytes = 17;

void put(std::vector<uint8_t>& out, uint64_t value, int bytes) {
  for (int i = 0; i < bytes; ++i) out.push_back(static_cast<uint8_t>(value >> (8 * i)));
}

uint64_t take(std::span<const uint8_t> in, size_t at, int bytes) {
  uint64_t value = 0;
  for (int i = 0; i < bytes; ++i) value |= static_cast<uint64_t>(in[at + i]) << (8 * i);
  return value;
}

}  // namespace

std::vector<uint8_t> encode_alert(const Failure& failure, int rank) {
  std::vector<uint8_t> out;
  const std::string text(failure.what());
  put(out, static_cast<uint8_t>(failure.code), 1);
  put(out, static_cast<uint32_t>(failure.peer), 4);
  put(out, static_cast<uint32_t>(failure.reported_by >= 0 ? failure.reported_by : rank), 4);
  put(out, failure.collective, 8);
  out.insert(out.end(), text.begin(), text.begin() + std::min(text.size(), kMaxAlertText));
  return out;
}

Failure decode_alert(std::span<const uint8_t> in, int sender, int receiver, int ranks) {
  if (in.size() < kFixedBytes || !is_failure_code(in[0])) {
    Failure failure(FailureCode::peer_lost, sender, "the peer failed and could not say why");
    failure.reported_by = failure.told_by = sender;
    return failure;
  }
  std::string text;
  for (uint8_t c : in.subspan(kFixedBytes, std::min(in.size() - kFixedBytes, kMaxAlertText))) {
    // Another worker's text is shown in terminals and logs, so only plain characters are kept.
    text.push_back(c >= 0x20 && c < 0x7f ? static_cast<char>(c) : '?');
  }
  Failure failure(static_cast<FailureCode>(in[0]), static_cast<int32_t>(take(in, 1, 4)), text);
  const int witness = static_cast<int32_t>(take(in, 5, 4));
  const bool possible = witness >= 0 && witness < ranks && witness != receiver;
  failure.reported_by = possible ? witness : sender;
  failure.told_by = sender;
  failure.collective = take(in, 9, 8);
  return failure;
}

}  // namespace sealring
