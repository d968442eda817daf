// Conversion of Python's bytes to C++ arrays.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <cstring>
#include <span>
#include <string>

namespace sealring {

inline const uint8_t* data(const nanobind::bytes& bytes) {
  return reinterpret_cast<const uint8_t*>(bytes.c_str());
}

inline std::span<const uint8_t> span_of(const nanobind::bytes& bytes) {
  return {data(bytes), bytes.size()};
}

template <typename Array>
Array exactly(const nanobind::bytes& bytes, const char* what) {
  Array out;
  if (bytes.size() != out.size()) {
    const std::string message =
        std::string(what) + " must have " + std::to_string(out.size()) + " bytes";
    throw nanobind::value_error(message.c_str());
  }
  std::memcpy(out.data(), bytes.c_str(), out.size());
  return out;
}

}  // namespace sealring
