// Reads any bytes as a certificate: every field is a part of the bytes, and accepted values are valid.
#include "identity/certificate.hpp"

#include "script.hpp"

using namespace sealring;

namespace {

bool is_part(der::Bytes field, der::Bytes whole) {
  return field.data() >= whole.data() && field.data() + field.size() <= whole.data() + whole.size();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const der::Bytes bytes(data, size);
  const ReadCertificate read = read_any(bytes);
  fuzz::require(!read.is_signed);
  if (!read.readable) {
    fuzz::require(read.claims.uri.empty() && read.key.empty());
    return 0;
  }
  const CertificateFields fields = read_certificate(bytes);
  for (const der::Bytes field : {fields.content, fields.algorithm, fields.signature, fields.issuer,
                                 fields.subject, fields.key}) {
    fuzz::require(is_part(field, bytes));
  }
  for (const Extension& each : fields.extensions) {
    fuzz::require(is_part(each.object, bytes) && is_part(each.value, bytes));
  }
  // Year 1 to year 9999.
  fuzz::require(fields.starts >= -62135596800 && fields.starts < 253402300800);
  if (read.claims.problem.empty()) {
    for (const char each : read.claims.uri) fuzz::require(static_cast<unsigned char>(each) < 0x80);
    fuzz::require(!read.claims.world ||
                  (*read.claims.world >= 1 && *read.claims.world <= kMaxWorld));
    fuzz::require(public_key_digest(fields.key) == read.claims.key);
  }
  // The certificate as its own authority: it counts as signed only if it signed itself.
  const Authority authority(bytes);
  const Authority* const authorities[] = {&authority};
  Issuers issuers(authorities);
  const ReadCertificate again = read_signed(bytes, issuers);
  fuzz::require(again.is_signed == issuers.signed_this(fields));
  fuzz::require(again.is_signed || again.claims.uri.empty());
  fuzz::require(!MessageSignatures().verify(fields.key, {}, bytes));
  return 0;
}
