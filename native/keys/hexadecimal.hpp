// Bytes as hexadecimal text.
#pragma once

#include <cstdint>
#include <span>
#include <string>

namespace sealring {

inline std::string hexadecimal(std::span<const uint8_t> bytes) {
  std::string text;
  for (const uint8_t byte : bytes) {
    text.push_back("0123456789abcdef"[byte >> 4]);
    text.push_back("0123456789abcdef"[byte & 15]);
  }
  return text;
}

}  // namespace sealring
