#include "identity/signatures.hpp"

#include <openssl/asn1t.h>
#include <openssl/core_names.h>
#include <openssl/err.h>
#include <openssl/objects.h>
#include <openssl/params.h>
#include <openssl/rsa.h>
#include <openssl/x509.h>

#include <algorithm>
#include <stdexcept>
#include <vector>

#include "keys/secret_memory.hpp"
#include "keys/sha256.hpp"

namespace sealring {
namespace {

using der::Bytes;

constexpr uint8_t kEd25519Algorithm[] = {0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70};
constexpr uint8_t kEd25519[] = {0x30, 0x2a, 0x30, 0x05, 0x06, 0x03,
                                0x2b, 0x65, 0x70, 0x03, 0x21, 0x00};
constexpr size_t kEd25519Bytes = 32;
constexpr int kLeastSecurityBits = 80;  // OpenSSL's security level 1, at which TLS runs

// Exists while OpenSSL looks something up in its tables, which have locks: no fork() happens meanwhile.
// Afterwards it removes the errors that OpenSSL left in the thread's queue, where Python's ssl would find
// them.
class InOpenSsl {
 public:
  InOpenSsl() { ERR_set_mark(); }
  ~InOpenSsl() { ERR_pop_to_mark(); }
  InOpenSsl(const InOpenSsl&) = delete;
  InOpenSsl& operator=(const InOpenSsl&) = delete;

 private:
  const NoFork no_fork_;
};

template <typename Type, void (*free_it)(Type*)>
struct Free {
  void operator()(Type* object) const { free_it(object); }
};
template <typename Type, void (*free_it)(Type*)>
using Owned = std::unique_ptr<Type, Free<Type, free_it>>;

// Whether an EC key names its curve instead of giving the curve's parameters.
bool names_its_curve(Bytes info) {
  der::Reader fields(der::only(info, der::kSequence).content);
  der::Reader algorithm(fields.content(der::kSequence));
  algorithm.content(der::kObject);
  return algorithm.next_is(der::kObject);
}

bool is_usable(EVP_PKEY* key, Bytes info) {
  if (EVP_PKEY_get_security_bits(key) < kLeastSecurityBits) return false;
  if (EVP_PKEY_is_a(key, "EC")) return names_its_curve(info);
  return EVP_PKEY_is_a(key, "ED25519") || EVP_PKEY_is_a(key, "ED448") || EVP_PKEY_is_a(key, "RSA");
}

// The digest that RSA-PSS parameters name.
int digest_of_pss(const X509_ALGOR* algorithm) {
  if (algorithm->parameter == nullptr || algorithm->parameter->type != V_ASN1_SEQUENCE) {
    return NID_sha1;  // RFC 8017's default
  }
  const ASN1_STRING* const text = algorithm->parameter->value.sequence;
  const unsigned char* at = ASN1_STRING_get0_data(text);
  const Owned<RSA_PSS_PARAMS, RSA_PSS_PARAMS_free> parameters(
      d2i_RSA_PSS_PARAMS(nullptr, &at, ASN1_STRING_length(text)));
  if (parameters == nullptr || parameters->hashAlgorithm == nullptr) return NID_sha1;
  return OBJ_obj2nid(parameters->hashAlgorithm->algorithm);
}

bool has_a_strong_digest(const X509_ALGOR* algorithm) {
  const int signature = OBJ_obj2nid(algorithm->algorithm);
  if (signature == NID_ED25519 || signature == NID_ED448) return true;
  int digest = NID_undef;
  if (signature == NID_rsassaPss) {
    digest = digest_of_pss(algorithm);
  } else if (OBJ_find_sigid_algs(signature, &digest, nullptr) != 1) {
    return false;
  }
  constexpr int kStrong[] = {NID_sha224,   NID_sha256,   NID_sha384,   NID_sha512,
                             NID_sha3_224, NID_sha3_256, NID_sha3_384, NID_sha3_512};
  return std::find(std::begin(kStrong), std::end(kStrong), digest) != std::end(kStrong);
}

}  // namespace

Digest sha256(Bytes bytes) {
  Digest digest;
  if (EVP_Digest(bytes.data(), bytes.size(), digest.data(), nullptr, sha256_algorithm(), nullptr) !=
      1) {
    throw std::runtime_error("OpenSSL failed in SHA-256");
  }
  return digest;
}

bool is_ed25519_key(Bytes info) {
  return info.size() == sizeof kEd25519 + kEd25519Bytes &&
         std::equal(std::begin(kEd25519), std::end(kEd25519), info.begin());
}

PublicKey read_public_key(Bytes info) {
  const InOpenSsl in_openssl;
  // A shortcut: otherwise OpenSSL tries one decoder after the other, which takes 20 times as long.
  if (is_ed25519_key(info)) {
    return PublicKey(EVP_PKEY_new_raw_public_key_ex(nullptr, "ED25519", nullptr,
                                                    info.data() + sizeof kEd25519, kEd25519Bytes));
  }
  const unsigned char* at = info.data();
  PublicKey key(d2i_PUBKEY(nullptr, &at, static_cast<long>(info.size())));
  if (key == nullptr || at != info.data() + info.size() || !is_usable(key.get(), info)) return {};
  return key;
}

std::optional<Digest> public_key_digest(Bytes info) {
  if (is_ed25519_key(info)) return sha256(info);
  const PublicKey key = read_public_key(info);
  if (key == nullptr) return std::nullopt;
  const InOpenSsl in_openssl;
  if (EVP_PKEY_is_a(key.get(), "EC")) {
    EVP_PKEY_set_utf8_string_param(key.get(), OSSL_PKEY_PARAM_EC_POINT_CONVERSION_FORMAT,
                                   "uncompressed");
  }
  unsigned char* written = nullptr;
  const int size = i2d_PUBKEY(key.get(), &written);
  if (size <= 0) return std::nullopt;
  const Digest digest = sha256({written, static_cast<size_t>(size)});
  OPENSSL_free(written);
  return digest;
}

CertificateSignatures::CertificateSignatures(EVP_PKEY* key) : key_(key) {
  const InOpenSsl in_openssl;
  if (EVP_PKEY_is_a(key, "ED25519")) ed25519_.reset(EVP_MD_CTX_new());
}

bool CertificateSignatures::verify(Bytes algorithm, Bytes content, Bytes signature) {
  const InOpenSsl in_openssl;
  if (ed25519_ != nullptr) {
    return std::ranges::equal(algorithm, kEd25519Algorithm) &&
           EVP_DigestVerifyInit_ex(ed25519_.get(), nullptr, nullptr, nullptr, nullptr, key_,
                                   nullptr) == 1 &&
           EVP_DigestVerify(ed25519_.get(), signature.data(), signature.size(), content.data(),
                            content.size()) == 1;
  }
  const unsigned char* at = algorithm.data();
  const Owned<X509_ALGOR, X509_ALGOR_free> identifier(
      d2i_X509_ALGOR(nullptr, &at, static_cast<long>(algorithm.size())));
  const Owned<ASN1_STRING, ASN1_STRING_free> bits(ASN1_STRING_type_new(V_ASN1_BIT_STRING));
  const Owned<ASN1_STRING, ASN1_STRING_free> text(ASN1_STRING_type_new(V_ASN1_SEQUENCE));
  if (identifier == nullptr || bits == nullptr || text == nullptr ||
      !has_a_strong_digest(identifier.get()) ||
      ASN1_STRING_set(bits.get(), signature.data(), static_cast<int>(signature.size())) != 1 ||
      ASN1_STRING_set(text.get(), content.data(), static_cast<int>(content.size())) != 1) {
    return false;
  }
  return ASN1_item_verify(ASN1_ITEM_rptr(ASN1_SEQUENCE), identifier.get(), bits.get(), text.get(),
                          key_) == 1;
}

MessageSignatures::MessageSignatures() {
  const InOpenSsl in_openssl;
  ed25519_.reset(EVP_PKEY_CTX_new_from_name(nullptr, "ED25519", nullptr));
}

PublicKey MessageSignatures::read(Bytes key) {
  if (!is_ed25519_key(key) || EVP_PKEY_fromdata_init(ed25519_.get()) != 1) {
    return read_public_key(key);
  }
  // The parameters' constructors take pointers to non-const; the key is only read.
  OSSL_PARAM params[] = {OSSL_PARAM_construct_octet_string(
                             OSSL_PKEY_PARAM_PUB_KEY,
                             const_cast<uint8_t*>(key.data() + sizeof kEd25519), kEd25519Bytes),
                         OSSL_PARAM_construct_end()};
  EVP_PKEY* made = nullptr;
  if (EVP_PKEY_fromdata(ed25519_.get(), &made, EVP_PKEY_PUBLIC_KEY, params) != 1) return {};
  return PublicKey(made);
}

bool MessageSignatures::verify(Bytes info, Bytes signature, Bytes message) {
  const InOpenSsl in_openssl;
  const PublicKey owned = read(info);
  EVP_PKEY* const key = owned.get();
  if (key == nullptr) return false;
  const Owned<EVP_MD_CTX, EVP_MD_CTX_free> context(EVP_MD_CTX_new());
  const bool ours = is_ed25519_key(info);
  const bool rsa = !ours && EVP_PKEY_is_a(key, "RSA");
  const char* const digest = rsa || (!ours && EVP_PKEY_is_a(key, "EC")) ? "SHA256" : nullptr;
  EVP_PKEY_CTX* settings = nullptr;
  if (context == nullptr || EVP_DigestVerifyInit_ex(context.get(), &settings, digest, nullptr,
                                                    nullptr, key, nullptr) != 1) {
    return false;
  }
  if (rsa && (EVP_PKEY_CTX_set_rsa_padding(settings, RSA_PKCS1_PSS_PADDING) != 1 ||
              EVP_PKEY_CTX_set_rsa_pss_saltlen(settings, RSA_PSS_SALTLEN_DIGEST) != 1)) {
    return false;
  }
  return EVP_DigestVerify(context.get(), signature.data(), signature.size(), message.data(),
                          message.size()) == 1;
}

}  // namespace sealring
