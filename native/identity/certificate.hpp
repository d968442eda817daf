// Reads a certificate: who signed it, and what it claims about a worker.
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

// One extension, with neither its meaning nor its form checked.
struct Extension {
  der::Bytes object;  // its identifier, with tag and length
  der::Bytes value;
};

// A certificate's fields. Each refers to a part of the bytes that were read; these must outlive it.
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

// Throws der::NotDer if the bytes are no certificate of version 1 (without extensions) or version 3.
CertificateFields read_certificate(der::Bytes bytes);

// A signer of certificates.
class Authority {
 public:
  // Throws der::NotDer if the bytes are no certificate. An authority whose key cannot be read has signed
  // nothing.
  explicit Authority(der::Bytes certificate);
  der::Bytes name() const { return name_; }
  EVP_PKEY* key() const { return key_.get(); }

 private:
  std::vector<uint8_t> name_;
  PublicKey key_;
};

// Authorities prepared for checking certificates. For one thread; the authorities must outlive it.
class Issuers {
 public:
  explicit Issuers(std::span<const Authority* const> authorities);
  // Whether one of them signed this certificate directly, with no other certificate in between.
  bool signed_this(const CertificateFields& certificate);

 private:
  struct Issuer {
    der::Bytes name;
    CertificateSignatures signatures;
  };
  std::vector<Issuer> issuers_;
};

// What a certificate claims about its holder. Proves nothing by itself.
struct Claims {
  // Why this is no worker's certificate; the other fields then have no meaning.
  std::string problem;
  std::string uri;  // the worker's name, unchanged
  std::optional<uint32_t> world;
  bool states_constraints = false;  // it has basic constraints
  bool is_authority = false;
  // True if the key is not an Ed25519 key, or if there are extensions that are not read here, or not in the
  // form in which sealring issues them. The Python package cryptography then checks the certificate.
  bool has_foreign_parts = false;
  Digest key{};  // public_key_digest()
};

Claims claims_in(const CertificateFields& certificate);

// The result of reading a certificate.
struct ReadCertificate {
  Digest fingerprint{};  // SHA-256 of the certificate
  bool readable = false;  // the bytes are a certificate
  bool is_signed = false;  // whether one of the given authorities signed it
  int64_t starts = 0;
  int64_t ends = 0;
  Claims claims;
  std::vector<uint8_t> key;  // SubjectPublicKeyInfo
  std::vector<uint8_t> foreign;  // the whole certificate, if it has foreign parts
};

// Reads a certificate and does not ask who signed it.
ReadCertificate read_any(der::Bytes bytes);

// Reads a certificate's claims only if one of these issuers has signed it.
ReadCertificate read_signed(der::Bytes bytes, Issuers& issuers);

}  // namespace sealring
