// What the members of a group say of themselves while it forms (docs/spec.md, section 4).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "identity/signatures.hpp"
#include "keys/secret_memory.hpp"

namespace sealring {

inline constexpr size_t kContributionBytes = 32;

// Bytes that are no statement.
struct MalformedStatement : std::runtime_error {
  explicit MalformedStatement(const char* what) : std::runtime_error(what) {}
};

struct Statement {
  uint64_t rank = 0;
  std::string instance;
  std::string host;  // not checked: what is printable is for Python to say
  std::vector<uint8_t> addresses;
  std::vector<uint8_t> certificate;
  Digest fingerprint{};  // SHA-256 of the certificate
  Digest commitment{};
  Digest contribution{};  // SHA-256 of it
  bool contributes = false;  // not all of its contribution is zeros
};

// All members' statements, in the group's order. Contributions lie in the memory for keys alone.
class Statements {
 public:
  // Throws MalformedStatement.
  explicit Statements(std::span<const der::Bytes> encoded);

  size_t size() const { return statements_.size(); }
  const Statement& operator[](size_t at) const { return statements_[at]; }

  // SHA-256 over `before`, which has fields with their lengths, and over every statement.
  Digest transcript(der::Bytes before) const;

  // The place of the first member whose commitment is not SHA-256 over `before` and the value that it has
  // shown, with its length; -1 if there is none. There are as many values as members.
  int64_t first_wrong_value(der::Bytes before, std::span<const der::Bytes> shown) const;

  // HKDF over every member's contribution, which are wiped: so it can be asked for once.
  SecretBytes group_secret(std::string_view transcript, std::string_view purpose, size_t bytes);

 private:
  void read(der::Bytes encoded, uint8_t* contribution);

  std::vector<Statement> statements_;
  SecretBytes contributions_;
};

}  // namespace sealring
