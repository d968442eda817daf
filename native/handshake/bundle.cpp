#include "handshake/bundle.hpp"

#include <algorithm>

namespace sealring {
namespace {

constexpr size_t kBundleHeaderBytes = 8;

uint8_t* write_number(size_t value, uint8_t* out) {
  for (int shift = 24; shift >= 0; shift -= 8) *out++ = static_cast<uint8_t>(value >> shift);
  return out;
}

uint32_t number_at(const uint8_t* at) {
  return uint32_t{at[0]} << 24 | uint32_t{at[1]} << 16 | uint32_t{at[2]} << 8 | at[3];
}

}  // namespace

size_t bundle_size(std::span<const BundleEntry> entries) {
  size_t size = 0;
  for (const BundleEntry& each : entries) size += kBundleHeaderBytes + each.bytes.size();
  return size;
}

void write_bundle(std::span<const BundleEntry> entries, uint8_t* out) {
  for (const BundleEntry& each : entries) {
    out = write_number(each.bytes.size(), write_number(each.rank, out));
    out = std::ranges::copy(each.bytes, out).out;
  }
}

std::vector<BundleEntry> read_bundle(der::Bytes raw) {
  std::vector<BundleEntry> entries;
  while (!raw.empty()) {
    if (raw.size() < kBundleHeaderBytes) throw MalformedStatement("cut short");
    const uint32_t rank = number_at(raw.data());
    const size_t length = number_at(raw.data() + 4);
    raw = raw.subspan(kBundleHeaderBytes);
    if (length > raw.size() || length > kMostOfAnEntry ||
        (!entries.empty() && rank <= entries.back().rank)) {
      throw MalformedStatement("not in order, or too long");
    }
    entries.push_back({rank, raw.first(length)});
    raw = raw.subspan(length);
  }
  return entries;
}

}  // namespace sealring
