#include "identity/certificate.hpp"

#include <algorithm>

namespace sealring {
namespace {

using der::Bytes;
using der::NotDer;
using der::Reader;

// Ed25519 and Ed448, which have no parameters (RFC 8410).
bool is_of_edwards_curve(Bytes object) {
  return object.size() == 3 && object[0] == 0x2b && object[1] == 0x65 &&
         (object[2] == 0x70 || object[2] == 0x71);
}

// Checks an AlgorithmIdentifier: an object identifier and at most one parameter.
void require_algorithm(Bytes content) {
  Reader fields(content);
  const Bytes object = fields.content(der::kObject);
  der::require_object(object);
  if (!is_of_edwards_curve(object) && !fields.done()) fields.next();
  fields.end();
}

// Checks the form of a Name: a sequence of sets of pairs. Names are compared as bytes elsewhere.
void require_name(Bytes content) {
  Reader parts(content);
  while (!parts.done()) {
    Reader pairs(parts.content(der::kSet));
    while (!pairs.done()) {
      Reader pair(pairs.content(der::kSequence));
      der::require_object(pair.content(der::kObject));
      pair.next();
      pair.end();
    }
  }
}

void require_key(Bytes content) {
  Reader fields(content);
  require_algorithm(fields.content(der::kSequence));
  der::require_bit_string(fields.content(der::kBitString));
  fields.end();
}

void skip_unique_identifier(Reader& fields, uint8_t number) {
  if (fields.next_is(der::implicit_tag(number))) {
    der::require_bit_string(fields.content(der::implicit_tag(number)));
  }
}

std::vector<Extension> read_extensions(Bytes content) {
  std::vector<Extension> found;
  Reader list(content);
  while (!list.done()) {
    Reader fields(list.content(der::kSequence));
    const der::Element object = fields.take(der::kObject);
    der::require_object(object.content);
    // A non-critical extension must leave the field out, because that is the default.
    if (fields.next_is(der::kBoolean) && !der::boolean(fields.content(der::kBoolean))) {
      throw NotDer("an extension states a default");
    }
    const Bytes value = fields.content(der::kOctetString);
    fields.end();
    found.push_back({object.whole, value});
  }
  return found;
}

}  // namespace

CertificateFields read_certificate(Bytes bytes) {
  CertificateFields out;
  Reader outer(der::only(bytes, der::kSequence).content);
  const der::Element content = outer.take(der::kSequence);
  const der::Element algorithm = outer.take(der::kSequence);
  require_algorithm(algorithm.content);
  const Bytes signature = outer.content(der::kBitString);
  der::require_bit_string(signature);
  outer.end();
  if (signature[0] != 0) throw NotDer("a signature is not whole bytes");
  out.content = content.whole;
  out.algorithm = algorithm.whole;
  out.signature = signature.subspan(1);

  Reader fields(content.content);
  const bool extended = fields.next_is(der::explicit_tag(0));
  if (extended) {
    const Bytes version = fields.content(der::explicit_tag(0));
    if (der::unsigned_integer(der::only(version, der::kInteger).content) != 2) {
      throw NotDer("it is of a version that has no certificates like this");
    }
  }
  der::require_integer(fields.content(der::kInteger));
  const der::Element named = fields.take(der::kSequence);
  require_algorithm(named.content);
  out.one_algorithm = std::ranges::equal(named.whole, algorithm.whole);
  const der::Element issuer = fields.take(der::kSequence);
  require_name(issuer.content);
  out.issuer = issuer.whole;
  Reader validity(fields.content(der::kSequence));
  out.starts = der::time(validity.next());
  out.ends = der::time(validity.next());
  validity.end();
  const der::Element subject = fields.take(der::kSequence);
  require_name(subject.content);
  out.subject = subject.whole;
  const der::Element key = fields.take(der::kSequence);
  require_key(key.content);
  out.key = key.whole;
  if (extended) {
    skip_unique_identifier(fields, 1);
    skip_unique_identifier(fields, 2);
    if (fields.next_is(der::explicit_tag(3))) {
      const Bytes list = fields.content(der::explicit_tag(3));
      out.extensions = read_extensions(der::only(list, der::kSequence).content);
    }
  }
  fields.end();
  return out;
}

Authority::Authority(Bytes certificate) {
  const CertificateFields fields = read_certificate(certificate);
  name_.assign(fields.subject.begin(), fields.subject.end());
  key_ = read_public_key(fields.key);
}

Issuers::Issuers(std::span<const Authority* const> authorities) {
  for (const Authority* each : authorities) {
    if (each->key() != nullptr)
      issuers_.push_back({each->name(), CertificateSignatures(each->key())});
  }
}

bool Issuers::signed_this(const CertificateFields& certificate) {
  return certificate.one_algorithm && std::ranges::any_of(issuers_, [&](Issuer& each) {
           return std::ranges::equal(certificate.issuer, each.name) &&
                  each.signatures.verify(certificate.algorithm, certificate.content,
                                         certificate.signature);
         });
}

namespace {

template <typename IsSigned>
ReadCertificate read_if(Bytes bytes, bool of_any_signer, IsSigned is_signed) {
  ReadCertificate out;
  out.fingerprint = sha256(bytes);
  try {
    const CertificateFields fields = read_certificate(bytes);
    out.readable = true;
    out.starts = fields.starts;
    out.ends = fields.ends;
    out.is_signed = is_signed(fields);
    if (out.is_signed || of_any_signer) {
      out.claims = claims_in(fields);
      out.key.assign(fields.key.begin(), fields.key.end());
      if (out.claims.has_foreign_parts) out.foreign.assign(bytes.begin(), bytes.end());
    }
  } catch (const NotDer&) {
    out.readable = false;
  }
  return out;
}

}  // namespace

ReadCertificate read_any(Bytes bytes) {
  return read_if(bytes, true, [](const CertificateFields&) { return false; });
}

ReadCertificate read_signed(Bytes bytes, Issuers& issuers) {
  return read_if(bytes, false,
                 [&](const CertificateFields& fields) { return issuers.signed_this(fields); });
}

}  // namespace sealring
