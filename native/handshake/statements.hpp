// Statements: what a group's members say about themselves while the group forms (docs/spec.md, section 4).
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

// Thrown for bytes that are no statement.
struct MalformedStatement : std::runtime_error {
  explicit MalformedStatement(const char* what) : std::runtime_error(what) {}
};

struct Statement {
  uint64_t rank = 0;
  std::string instance;
  std::string host;  // not checked here: Python refuses what is not printable
  std::vector<uint8_t> addresses;
  std::vector<uint8_t> certificate;
  Digest fingerprint{};  // SHA-256 of the certificate
  Digest commitment{};
  Digest contribution{};  // SHA-256 of the contribution
  bool contributes = false;  // the contribution is not all zeros
};

// All members' statements, in the group's order. Contributions themselves are kept only in the memory for
// keys.
class Statements {
 public:
  // Throws MalformedStatement.
  explicit Statements(std::span<const der::Bytes> encoded);

  size_t size() const { return statements_.size(); }
  const Statement& operator[](size_t at) const { return statements_[at]; }

  // SHA-256 over `before` (fields, each after its length) and over every statement.
  Digest transcript(der::Bytes before) const;

  // The place of the first member whose shown value does not fit its commitment, which must be SHA-256 over
  // `before` and the value after its length; -1 if all fit. `shown` has one value for each member.
  int64_t first_wrong_value(der::Bytes before, std::span<const der::Bytes> shown) const;

  // HKDF over all members' contributions. Wipes them, so it can be called only once.
  SecretBytes group_secret(std::string_view transcript, std::string_view purpose, size_t bytes);

 private:
  void read(der::Bytes encoded, uint8_t* contribution);

  std::vector<Statement> statements_;
  SecretBytes contributions_;
};

}  // namespace sealring
