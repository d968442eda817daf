// Bindings of single parts of the core, for test vectors, fuzzing, measurements and the reference.
#include <nanobind/stl/string.h>
#include <openssl/crypto.h>

#include <string>
#include <vector>

#include "bindings/bind.hpp"
#include "bindings/convert.hpp"
#include "keys/keys.hpp"
#include "record/alert.hpp"
#include "record/record.hpp"
#include "reduce/reduce.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace sealring;

namespace {

nb::dict header_fields(const Header& header) {
  nb::dict out;
  out["kind"] = static_cast<int>(header.kind);
  out["length"] = header.length;
  out["count"] = header.count;
  out["lane"] = header.lane;
  out["generation"] = header.generation;
  out["sender"] = header.sender;
  out["receiver"] = header.receiver;
  out["collective"] = header.collective;
  out["operation"] = header.operation;
  out["dtype"] = header.dtype;
  out["reduction"] = header.reduction;
  out["algorithm"] = header.algorithm;
  out["message"] = header.message;
  out["segment"] = header.segment;
  out["root"] = header.root;
  out["total"] = header.total;
  return out;
}

// Both ends of one key, to measure the cipher alone. It counts its nonces, so that none is used twice. The
// tag follows the ciphertext.
class Cipher {
 public:
  explicit Cipher(const KeyBytes& key)
      : sealing_(key, Aead::Direction::seal), opening_(key, Aead::Direction::open) {}

  void seal(uintptr_t plain, size_t bytes, uintptr_t sealed) {
    uint8_t* const out = reinterpret_cast<uint8_t*>(sealed);
    sealing_.seal(make_nonce(0, sealed_++), {}, reinterpret_cast<const uint8_t*>(plain), bytes, out,
                  out + bytes);
  }
  // Opens the next payload, in the order of sealing. With a bad tag it returns false and does not count.
  bool open(uintptr_t sealed, size_t bytes, uintptr_t plain) {
    const uint8_t* const in = reinterpret_cast<const uint8_t*>(sealed);
    const bool good = opening_.open(make_nonce(0, opened_), {}, in, bytes, in + bytes,
                                    reinterpret_cast<uint8_t*>(plain));
    if (good) ++opened_;
    return good;
  }

 private:
  Aead sealing_, opening_;
  uint64_t sealed_ = 0, opened_ = 0;
};

}  // namespace

void bind_pieces(nb::module_& m) {
  nb::class_<Cipher>(m, "Cipher")
      .def(
          "__init__",
          [](Cipher* self, const nb::bytes& key) {
            new (self) Cipher(exactly<KeyBytes>(key, "key"));
          },
          "key"_a)
      .def("seal", &Cipher::seal, "plain"_a, "bytes"_a, "sealed"_a,
           nb::call_guard<nb::gil_scoped_release>())
      .def("open", &Cipher::open, "sealed"_a, "bytes"_a, "plain"_a,
           nb::call_guard<nb::gil_scoped_release>());

  m.def(
      "reduce",
      [](uintptr_t dst, uintptr_t src, size_t bytes, DType dtype, ReduceKind kind) {
        const ReduceFn reduce = reduce_function(dtype, kind);
        if (reduce == nullptr) throw nb::value_error("this dtype has no such reduction");
        reduce(reinterpret_cast<void*>(dst), reinterpret_cast<const void*>(src), bytes);
      },
      "dst"_a, "src"_a, "bytes"_a, "dtype"_a, "kind"_a);
  m.def(
      "aead_seal",
      [](const nb::bytes& key, const nb::bytes& nonce, const nb::bytes& associated,
         const nb::bytes& plain) {
        Aead aead(exactly<KeyBytes>(key, "key"), Aead::Direction::seal, Suite::aes_256_gcm,
                  Aead::Zeros::allowed);
        std::vector<uint8_t> out(plain.size() + kTagBytes);
        aead.seal(exactly<Nonce>(nonce, "nonce"), span_of(associated), data(plain), plain.size(),
                  out.data(), out.data() + plain.size());
        return nb::bytes(out.data(), out.size());
      },
      "key"_a, "nonce"_a, "associated"_a, "plain"_a);
  m.def(
      "aead_open",
      [](const nb::bytes& key, const nb::bytes& nonce, const nb::bytes& associated,
         const nb::bytes& sealed) -> nb::object {
        if (sealed.size() < kTagBytes) return nb::none();
        const size_t bytes = sealed.size() - kTagBytes;
        Aead aead(exactly<KeyBytes>(key, "key"), Aead::Direction::open, Suite::aes_256_gcm,
                  Aead::Zeros::allowed);
        std::vector<uint8_t> out(bytes);
        if (!aead.open(exactly<Nonce>(nonce, "nonce"), span_of(associated), data(sealed), bytes,
                       data(sealed) + bytes, out.data())) {
          return nb::none();
        }
        return nb::bytes(out.data(), out.size());
      },
      "key"_a, "nonce"_a, "associated"_a, "sealed"_a);
  m.def(
      "ratchet",
      [](const nb::bytes& key) {
        const KeyBytes next = ratchet(exactly<KeyBytes>(key, "key"));
        return nb::bytes(next.data(), next.size());
      },
      "key"_a);
  m.def(
      "parse_header",
      [](const nb::bytes& bytes) -> nb::object {
        Header header;
        if (bytes.size() < kHeaderBytes || !Header::decode(data(bytes), header)) return nb::none();
        return header_fields(header);
      },
      "bytes"_a, "The fields of a record's header, or None where it is none.");
  m.def(
      "parse_alert",
      [](const nb::bytes& bytes, int sender, int receiver, int ranks) {
        return decode_alert(span_of(bytes), sender, receiver, ranks);
      },
      "bytes"_a, "sender"_a, "receiver"_a, "ranks"_a);
  m.def(
      "gpu_key",
      [](const nb::bytes& key) {
        const KeyBytes made = gpu_key(exactly<KeyBytes>(key, "key"));
        return nb::bytes(made.data(), made.size());
      },
      "key"_a);
  // The version of the library that is called, which may differ from the headers that were compiled.
  m.def("openssl_version", [] { return std::string(OpenSSL_version(OPENSSL_VERSION)); });
  m.def("openssl_version_number", &OpenSSL_version_num);
#ifdef SEALRING_STATIC_OPENSSL
  m.attr("OPENSSL_BUILT_IN") = true;
#else
  m.attr("OPENSSL_BUILT_IN") = false;
#endif
}
