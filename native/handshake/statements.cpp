#include "handshake/statements.hpp"

#include <algorithm>
#include <array>
#include <memory>

#include "keys/hkdf.hpp"
#include "keys/sha256.hpp"

namespace sealring {
namespace {

using der::Bytes;

constexpr size_t kFields = 7;
constexpr size_t kRankBytes = 8;
constexpr size_t kInstanceBytes = 32;
constexpr size_t kMostOfAddresses = 1024;

void require(bool good, const char* what) {
  if (!good) throw MalformedStatement(what);
}

uint64_t big_endian(Bytes bytes) {
  uint64_t value = 0;
  for (const uint8_t byte : bytes) value = value << 8 | byte;
  return value;
}

std::array<Bytes, kFields> fields_of(Bytes encoded) {
  std::array<Bytes, kFields> fields;
  size_t count = 0;
  while (!encoded.empty()) {
    require(encoded.size() >= 4, "a statement is cut short");
    const uint64_t length = big_endian(encoded.first(4));
    encoded = encoded.subspan(4);
    require(length <= encoded.size(), "a statement is cut short");
    require(count < kFields, "a statement has not the fields it must have");
    fields[count++] = encoded.first(length);
    encoded = encoded.subspan(length);
  }
  require(count == kFields, "a statement has not the fields it must have");
  return fields;
}

bool is_instance(Bytes text) {
  return text.size() == kInstanceBytes && std::ranges::all_of(text, [](uint8_t each) {
           return (each >= '0' && each <= '9') || (each >= 'a' && each <= 'f');
         });
}

std::string text_of(Bytes bytes) { return {bytes.begin(), bytes.end()}; }

// SHA-256 over fields, each preceded by its length.
class FieldHash {
 public:
  explicit FieldHash(Bytes before) : context_(EVP_MD_CTX_new(), EVP_MD_CTX_free) {
    check(context_ && EVP_DigestInit_ex2(context_.get(), sha256_algorithm(), nullptr) == 1);
    update(before);
  }

  void add(Bytes field) {
    add_length(field.size());
    update(field);
  }

  Digest result() {
    Digest digest;
    check(EVP_DigestFinal_ex(context_.get(), digest.data(), nullptr) == 1);
    return digest;
  }

 private:
  static void check(bool good) {
    if (!good) throw std::runtime_error("OpenSSL failed in SHA-256");
  }

  void add_length(size_t size) {
    std::array<uint8_t, 4> length;
    for (size_t i = 0; i < 4; ++i) length[i] = static_cast<uint8_t>(size >> (8 * (3 - i)));
    update(length);
  }

  void update(Bytes bytes) {
    check(EVP_DigestUpdate(context_.get(), bytes.data(), bytes.size()) == 1);
  }

  std::unique_ptr<EVP_MD_CTX, decltype(&EVP_MD_CTX_free)> context_;
};

Bytes bytes_of(std::string_view text) {
  return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

}  // namespace

Statements::Statements(std::span<const Bytes> encoded)
    : contributions_(kContributionBytes * encoded.size()) {
  statements_.reserve(encoded.size());
  uint8_t* contribution = contributions_.data();
  for (const Bytes each : encoded) {
    read(each, contribution);
    contribution += kContributionBytes;
  }
}

void Statements::read(Bytes encoded, uint8_t* contribution) {
  const auto [rank, instance, host, addresses, certificate, commitment, secret] =
      fields_of(encoded);
  Statement out;
  require(rank.size() == kRankBytes && commitment.size() == out.commitment.size() &&
              secret.size() == kContributionBytes,
          "a statement's rank, commitment or contribution is not one");
  require(is_instance(instance) && addresses.size() <= kMostOfAddresses,
          "a statement's instance, host or addresses are none");
  out.rank = big_endian(rank);
  out.instance = text_of(instance);
  out.host = text_of(host);
  out.addresses.assign(addresses.begin(), addresses.end());
  out.certificate.assign(certificate.begin(), certificate.end());
  out.fingerprint = sha256(certificate);
  std::ranges::copy(commitment, out.commitment.begin());
  std::ranges::copy(secret, contribution);
  out.contribution = sha256(secret);
  out.contributes = std::ranges::any_of(secret, [](uint8_t each) { return each != 0; });
  statements_.push_back(std::move(out));
}

Digest Statements::transcript(Bytes before) const {
  FieldHash hash(before);
  for (const Statement& each : statements_) {
    std::array<uint8_t, kRankBytes> rank;
    for (size_t i = 0; i < rank.size(); ++i) {
      rank[i] = static_cast<uint8_t>(each.rank >> (8 * (rank.size() - 1 - i)));
    }
    hash.add(rank);
    hash.add(bytes_of(each.instance));
    hash.add(bytes_of(each.host));
    hash.add(each.addresses);
    hash.add(each.fingerprint);
    hash.add(each.commitment);
    hash.add(each.contribution);
  }
  return hash.result();
}

int64_t Statements::first_wrong_value(Bytes before, std::span<const Bytes> shown) const {
  if (shown.size() != size())
    throw std::invalid_argument("there are not as many values as members");
  for (size_t i = 0; i < shown.size(); ++i) {
    FieldHash hash(before);
    hash.add(shown[i]);
    if (hash.result() != statements_[i].commitment) return static_cast<int64_t>(i);
  }
  return -1;
}

SecretBytes Statements::group_secret(std::string_view transcript, std::string_view purpose,
                                     size_t bytes) {
  SecretBytes secret = hkdf(Hash::sha256, contributions_, transcript, purpose, bytes);
  contributions_.wipe();
  return secret;
}

}  // namespace sealring
