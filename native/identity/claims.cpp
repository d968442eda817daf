// Reads what a worker's certificate claims: the worker's name, the world size it was issued for, and that the
// worker is no authority.
#include <algorithm>

#include "identity/certificate.hpp"

namespace sealring {
namespace {

using der::Bytes;
using der::NotDer;
using der::Reader;

// Object identifiers. The last two are 2.25 and a UUID as a number (src/sealring/core/identity/certificates.py).
constexpr uint8_t kKeyIdentifier[] = {0x06, 0x03, 0x55, 0x1d, 0x0e};
constexpr uint8_t kKeyUsage[] = {0x06, 0x03, 0x55, 0x1d, 0x0f};
constexpr uint8_t kAlternativeName[] = {0x06, 0x03, 0x55, 0x1d, 0x11};
constexpr uint8_t kBasicConstraints[] = {0x06, 0x03, 0x55, 0x1d, 0x13};
constexpr uint8_t kAuthorityKeyIdentifier[] = {0x06, 0x03, 0x55, 0x1d, 0x23};
constexpr uint8_t kExtendedKeyUsage[] = {0x06, 0x03, 0x55, 0x1d, 0x25};
constexpr uint8_t kWorldSize[] = {0x06, 0x14, 0x69, 0x81, 0xde, 0x9b, 0x8f, 0xc3, 0x85, 0xa0, 0xf2,
                                  0xad, 0xdf, 0x9d, 0xa8, 0xda, 0xc5, 0xf4, 0xfc, 0xf0, 0xfc, 0x17};
constexpr uint8_t kAttestation[] = {0x06, 0x14, 0x69, 0x81, 0xf8, 0x83, 0x9a, 0xd6,
                                    0xe0, 0x96, 0xaa, 0xa1, 0xbb, 0xac, 0xc2, 0xa9,
                                    0xf7, 0x9c, 0xfa, 0xe0, 0xc4, 0x05};

// The values that sealring issues: digitalSignature; clientAuth and serverAuth; identifiers of 20 bytes.
constexpr uint8_t kSigns[] = {0x03, 0x02, 0x07, 0x80};
constexpr uint8_t kBothEnds[] = {0x30, 0x14, 0x06, 0x08, 0x2b, 0x06, 0x01, 0x05, 0x05, 0x07, 0x03,
                                 0x02, 0x06, 0x08, 0x2b, 0x06, 0x01, 0x05, 0x05, 0x07, 0x03, 0x01};
constexpr uint8_t kIdentifier[] = {0x04, 0x14};
constexpr uint8_t kIdentifierOfAuthority[] = {0x30, 0x16, 0x80, 0x14};
constexpr size_t kIdentifierBytes = 20;

constexpr uint8_t kUri = der::implicit_tag(6);
constexpr const char* kUnreadable = "its extensions cannot be read";

bool same(Bytes one, Bytes other) { return std::ranges::equal(one, other); }

const Extension* find(const std::vector<Extension>& extensions, Bytes object) {
  const auto found = std::ranges::find_if(
      extensions, [&](const Extension& each) { return same(each.object, object); });
  return found == extensions.end() ? nullptr : &*found;
}

bool has_a_duplicate(const std::vector<Extension>& extensions) {
  std::vector<Bytes> objects;
  objects.reserve(extensions.size());
  for (const Extension& each : extensions) objects.push_back(each.object);
  const auto before = [](Bytes a, Bytes b) { return std::ranges::lexicographical_compare(a, b); };
  std::ranges::sort(objects, before);
  return std::ranges::adjacent_find(objects, same) != objects.end();
}

bool is_identifier(Bytes value, Bytes head) {
  return value.size() == head.size() + kIdentifierBytes && same(value.first(head.size()), head);
}

// True for an extension that is not read here and does not have the value that sealring issues.
bool is_foreign(const Extension& each) {
  const auto is = [&](Bytes object) { return same(each.object, object); };
  if (is(kAlternativeName) || is(kBasicConstraints) || is(kWorldSize) || is(kAttestation)) {
    return false;
  }
  if (is(kKeyUsage)) return !same(each.value, kSigns);
  if (is(kExtendedKeyUsage)) return !same(each.value, kBothEnds);
  if (is(kKeyIdentifier)) return !is_identifier(each.value, kIdentifier);
  if (is(kAuthorityKeyIdentifier)) return !is_identifier(each.value, kIdentifierOfAuthority);
  return true;
}

void read_name(const Extension* extension, Claims& claims) {
  if (extension == nullptr) {
    claims.problem = "it has no subject alternative name";
    return;
  }
  Reader names(der::only(extension->value, der::kSequence).content);
  const bool is_uri = names.next_is(kUri);
  Bytes uri;
  if (!names.done()) uri = names.next().content;
  // A second name would let one certificate speak for two workers.
  if (!is_uri || !names.done()) {
    while (!names.done()) names.next();
    claims.problem = "its subject alternative name is not exactly one URI";
    return;
  }
  if (!std::ranges::all_of(uri, [](uint8_t each) { return each < 0x80; })) {
    throw NotDer("a URI is not ASCII");
  }
  claims.uri.assign(uri.begin(), uri.end());
}

void read_world(const Extension* extension, Claims& claims) {
  if (extension == nullptr || !claims.problem.empty()) return;
  uint64_t world = 0;
  try {
    world = der::unsigned_integer(der::only(extension->value, der::kInteger).content);
  } catch (const NotDer&) {
    claims.problem = "its world size cannot be read: it is not a DER INTEGER";
    return;
  }
  if (world < 1 || world > kMaxWorld) {
    claims.problem = "its world size is not between 1 and " + std::to_string(kMaxWorld);
  } else {
    claims.world = static_cast<uint32_t>(world);
  }
}

void read_constraints(const Extension* extension, Claims& claims) {
  if (extension == nullptr) return;
  Reader fields(der::only(extension->value, der::kSequence).content);
  if (!fields.done()) {
    claims.is_authority = der::boolean(fields.content(der::kBoolean));
    if (!claims.is_authority) throw NotDer("basic constraints state a default");
  }
  // The path length: how many authorities may be below this one.
  if (!fields.done()) der::unsigned_integer(fields.content(der::kInteger));
  fields.end();
  claims.states_constraints = true;
}

}  // namespace

Claims claims_in(const CertificateFields& certificate) {
  Claims claims;
  const std::vector<Extension>& extensions = certificate.extensions;
  try {
    read_constraints(find(extensions, kBasicConstraints), claims);
    read_name(find(extensions, kAlternativeName), claims);
    read_world(find(extensions, kWorldSize), claims);
    if (has_a_duplicate(extensions)) claims.problem = kUnreadable;
  } catch (const NotDer&) {
    claims.problem = kUnreadable;
  }
  claims.has_foreign_parts =
      !is_ed25519_key(certificate.key) || std::ranges::any_of(extensions, is_foreign);
  const std::optional<Digest> key = public_key_digest(certificate.key);
  if (key) {
    claims.key = *key;
  } else if (claims.problem.empty()) {
    claims.problem = "its public key cannot be used";
  }
  return claims;
}

}  // namespace sealring
