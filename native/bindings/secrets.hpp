// Secrets in Python's hands: kept in the memory for keys, never as `bytes`.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <cstring>
#include <memory>
#include <string>
#include <utility>

#include "keys/keys.hpp"
#include "keys/secret_memory.hpp"

namespace sealring {

// Makes an object whose destructor runs only in the process that made it. In a forked child the destructor
// would close what the child does not own, and wait for threads that the child does not have.
template <typename Object, typename... Arguments>
std::shared_ptr<Object> owned_here(Arguments&&... arguments) {
  return std::shared_ptr<Object>(new Object(std::forward<Arguments>(arguments)...),
                                 [process = ProcessMark()](Object* object) {
                                   if (process.here()) delete object;
                                 });
}

inline KeyBytes key_from(const SecretBytes& secret, const char* what) {
  secret.process().require(what);
  if (secret.size() != kKeyBytes) {
    const std::string message =
        std::string(what) + " must have " + std::to_string(kKeyBytes) + " bytes";
    throw nanobind::value_error(message.c_str());
  }
  KeyBytes key;
  std::memcpy(key.data(), secret.data(), kKeyBytes);
  return key;
}

}  // namespace sealring
