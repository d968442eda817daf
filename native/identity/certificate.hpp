// A certificate: who signed it, and what it says of a worker.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "identity/der.hpp"
#include "identity/signatures.hpp"

namespace sealring {

inline constexpr uint32_t kMaxWorld = 65536;  // limits.py

// One extension. Neither its meaning nor its form is checked.
struct Extension {
  der::Bytes object;  // its identifier, with tag and length
  der::Bytes value;
};

// A certificate's fields, each a part of the bytes that it was read from. Those must outlive it.
struct CertificateFields {
  der::Bytes content;  // what is signed
  der::Bytes algorithm;
  der::Bytes signature;
  bool one_algorithm = false;  // the signed fields name the same algorithm as the signature does
  der::Bytes issuer;
  der::Bytes subject;
  int64_t starts = 0;  // seconds since 1970
  int64_t ends = 0;
  der::Bytes key;  // SubjectPublicKeyInfo
  std::vector<Extension> extensions;
};

// Throws der::NotDer where these bytes are no certificate: of version 1 without extensions, or of version 3.
CertificateFields read_certificate(der::Bytes bytes);

// What signs certificates.
class Authority {
 public:
  // Throws der::NotDer where these bytes are no certificate. One whose key cannot be read has signed nothing.
  explicit Authority(der::Bytes certificate);
  der::Bytes name() const { return name_; }
  EVP_PKEY* key() const { return key_.get(); }

 private:
  std::vector<uint8_t> name_;
  PublicKey key_;
};

// Authorities while certificates are read. One thread uses it; the authorities must outlive it.
class Issuers {
 public:
  explicit Issuers(std::span<const Authority* const> authorities);
  // Whether one of them signed this very certificate, with no other in between.
  bool signed_this(const CertificateFields& certificate);

 private:
  struct Issuer {
    der::Bytes name;
    CertificateSignatures signatures;
  };
  std::vector<Issuer> issuers_;
};

// What a certificate says of its holder. Not proof of anything.
struct Claims {
  std::string problem;  // why it is not a worker's; the rest then has no meaning
  std::string uri;  // the worker's name, as it is spelt
  std::optional<uint32_t> world;
  bool states_constraints = false;  // it has basic constraints
  bool is_authority = false;
  // It has another key than one of Ed25519, or extensions that are not read here, or not in the form in which
  // sealring issues them. What they must be is for the package cryptography to say.
  bool has_foreign_parts = false;
  Digest key{};  // public_key_digest()
};

Claims claims_in(const CertificateFields& certificate);

// What is kept of a certificate that was read.
struct ReadCertificate {
  Digest fingerprint{};  // SHA-256 of it
  bool readable = false;  // it is a certificate
  bool is_signed = false;  // by one of the authorities that it was read with
  int64_t starts = 0;
  int64_t ends = 0;
  Claims claims;
  std::vector<uint8_t> key;  // SubjectPublicKeyInfo
  std::vector<uint8_t> foreign;  // all of it, if it has foreign parts
};

// Of any signer.
ReadCertificate read_any(der::Bytes bytes);

// What it claims is read only if one of these has signed it.
ReadCertificate read_signed(der::Bytes bytes, Issuers& issuers);

}  // namespace sealring
