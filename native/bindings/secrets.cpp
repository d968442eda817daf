#include "bindings/secrets.hpp"

#include "bindings/bind.hpp"
#include "bindings/buffer.hpp"
#include "bindings/convert.hpp"
#include "keys/hkdf.hpp"

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/rand.h>

#include <vector>

namespace nb = nanobind;
using namespace nb::literals;
using namespace sealring;

namespace {

const SecretBytes& here(const SecretBytes& secret) {
  secret.process().require("this secret");
  return secret;
}

void set_forked_process(const char* what) {
  const nb::object type = nb::module_::import_("sealring.errors").attr("ForkedProcess");
  PyErr_SetString(type.ptr(), what);
}

// Lends the secret's own memory as a buffer, not a copy.
int lend_buffer(PyObject* self, Py_buffer* buffer, int flags) {
  SecretBytes& secret = *nb::inst_ptr<SecretBytes>(self);
  try {
    here(secret);
  } catch (const ForkedProcess& forked) {
    buffer->obj = nullptr;
    set_forked_process(forked.what());
    return -1;
  }
  return PyBuffer_FillInfo(buffer, self, secret.data(), static_cast<Py_ssize_t>(secret.size()), 0,
                           flags);
}

PyType_Slot secret_slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(lend_buffer)},
                              {0, nullptr}};

uint8_t digit(uint8_t character) {
  if (character >= '0' && character <= '9') return static_cast<uint8_t>(character - '0');
  if (character >= 'a' && character <= 'f') return static_cast<uint8_t>(character - 'a' + 10);
  throw nb::value_error("not lower-case hexadecimal");
}

SecretBytes from_hex(const nb::object& text) {
  const BufferView view(text, false);
  if (view.size() % 2 != 0) throw nb::value_error("not whole bytes in hexadecimal");
  SecretBytes out(view.size() / 2);
  for (size_t i = 0; i < out.size(); ++i) {
    out[i] = static_cast<uint8_t>(digit(view.data()[2 * i]) << 4 | digit(view.data()[2 * i + 1]));
  }
  return out;
}

// Moves a secret out of a `bytes` object that a library returned, and overwrites the object although it is
// immutable in Python. Nothing else may hold it. Python shares the `bytes` objects of length 0 and 1, so
// these are refused.
SecretBytes moved(const nb::bytes& source) {
  if (source.size() < 2) throw nb::value_error("no secret has less than two bytes");
  SecretBytes out(source.size());
  std::copy_n(reinterpret_cast<const uint8_t*>(source.c_str()), source.size(), out.data());
  OPENSSL_cleanse(const_cast<char*>(source.c_str()), source.size());
  return out;
}

void write_hex(const SecretBytes& secret, const nb::object& into) {
  const BufferView view(into, true);
  if (view.size() != 2 * here(secret).size())
    throw nb::value_error("the buffer has another length");
  for (size_t i = 0; i < secret.size(); ++i) {
    view.data()[2 * i] = static_cast<uint8_t>("0123456789abcdef"[secret[i] >> 4]);
    view.data()[2 * i + 1] = static_cast<uint8_t>("0123456789abcdef"[secret[i] & 15]);
  }
}

// HKDF-Extract and HKDF-Expand (RFC 5869) with SHA-256.
SecretBytes derive(const SecretBytes& secret, const nb::bytes& salt, const nb::bytes& info,
                   size_t size) {
  return hkdf(Hash::sha256, here(secret), {salt.c_str(), salt.size()}, {info.c_str(), info.size()},
              size);
}

nb::list derive_each(const SecretBytes& secret, const nb::bytes& salt, const nb::tuple& infos,
                     size_t size) {
  std::vector<std::string_view> views;
  for (const nb::handle each : infos) {
    const auto info = nb::cast<nb::bytes>(each);
    views.emplace_back(info.c_str(), info.size());
  }
  nb::list out;
  for (SecretBytes& each :
       hkdf_each(Hash::sha256, here(secret), {salt.c_str(), salt.size()}, views, size)) {
    out.append(nb::cast(std::move(each)));
  }
  return out;
}

nb::bytes hmac_sha256(const SecretBytes& secret, const nb::bytes& data) {
  here(secret).require_key();
  uint8_t out[32];
  unsigned int size = sizeof out;
  {
    const NoFork no_fork;
    if (HMAC(EVP_sha256(), secret.data(), static_cast<int>(secret.size()),
             reinterpret_cast<const uint8_t*>(data.c_str()), data.size(), out, &size) == nullptr) {
      throw std::runtime_error("OpenSSL failed in HMAC");
    }
  }
  return nb::bytes(out, size);
}

Nonce nonce_from(const nb::bytes& bytes) {
  Nonce nonce;
  if (bytes.size() != nonce.size()) throw nb::value_error("a nonce has 12 bytes");
  std::memcpy(nonce.data(), bytes.c_str(), nonce.size());
  return nonce;
}

nb::bytes seal(const SecretBytes& secret, const nb::bytes& nonce, const nb::object& plain,
               const nb::bytes& associated) {
  const Aead aead(key_from(secret, "this secret"), Aead::Direction::seal);
  const BufferView view(plain, false);
  std::vector<uint8_t> out(view.size() + kTagBytes);
  aead.seal(nonce_from(nonce), span_of(associated), view.data(), view.size(), out.data(),
            out.data() + view.size());
  return nb::bytes(out.data(), out.size());
}

// Opens into a buffer that its owner can overwrite later. If the tag does not match, returns false and fills
// the buffer with zeros.
bool open_into(const SecretBytes& secret, const nb::bytes& nonce, const nb::bytes& sealed,
               const nb::bytes& associated, const nb::object& into) {
  const BufferView view(into, true);
  if (sealed.size() != view.size() + kTagBytes) return false;
  const Aead aead(key_from(secret, "this secret"), Aead::Direction::open);
  const uint8_t* const cipher = span_of(sealed).data();
  const bool good = aead.open(nonce_from(nonce), span_of(associated), cipher, view.size(),
                              cipher + view.size(), view.data());
  if (!good) OPENSSL_cleanse(view.data(), view.size());
  return good;
}

// Returns None if the tag does not match.
nb::object open(const SecretBytes& secret, const nb::bytes& nonce, const nb::bytes& sealed,
                const nb::bytes& associated) {
  if (sealed.size() < kTagBytes) return nb::none();
  const size_t bytes = sealed.size() - kTagBytes;
  const Aead aead(key_from(secret, "this secret"), Aead::Direction::open);
  std::vector<uint8_t> out(bytes);
  const uint8_t* const cipher = span_of(sealed).data();
  if (!aead.open(nonce_from(nonce), span_of(associated), cipher, bytes, cipher + bytes,
                 out.data())) {
    return nb::none();
  }
  return nb::bytes(out.data(), out.size());
}

}  // namespace

void bind_secrets(nb::module_& m) {
  nb::register_exception_translator([](const std::exception_ptr& thrown, void*) {
    try {
      std::rethrow_exception(thrown);
    } catch (const ForkedProcess& forked) {
      set_forked_process(forked.what());
    }
  });

  nb::class_<ProcessMark>(m, "ProcessMark")
      .def(nb::init<>())
      .def_prop_ro("here", &ProcessMark::here)
      .def("require", &ProcessMark::require, "what"_a);

  nb::class_<SecretBytes>(m, "Secret", nb::type_slots(secret_slots))
      .def(
          "__init__",
          [](SecretBytes* self, const nb::object& source) {
            const BufferView view(source, false);
            new (self) SecretBytes(view.size());
            std::copy_n(view.data(), view.size(), self->data());
          },
          "source"_a)
      .def_static(
          "zeros", [](size_t size) { return SecretBytes(size); }, "size"_a)
      .def_static(
          "random",
          [](size_t size) {
            SecretBytes out(size);
            const NoFork no_fork;
            if (RAND_priv_bytes(out.data(), static_cast<int>(size)) != 1) {
              throw std::runtime_error("OpenSSL has no random bytes");
            }
            return out;
          },
          "size"_a)
      .def_static("moved", &moved, "source"_a)
      .def_static("from_hex", &from_hex, "text"_a)
      .def("write_hex", &write_hex, "into"_a)
      .def(
          "part",
          [](const SecretBytes& self, size_t start, size_t size) {
            if (start > self.size() || size > self.size() - start) {
              throw nb::value_error("no such part");
            }
            SecretBytes out(size);
            std::copy_n(here(self).data() + start, size, out.data());
            return out;
          },
          "start"_a, "size"_a)
      .def("derive", &derive, "salt"_a, "info"_a, "size"_a)
      .def("derive_each", &derive_each, "salt"_a, "infos"_a, "size"_a)
      .def("hmac_sha256", &hmac_sha256, "data"_a)
      .def("seal", &seal, "nonce"_a, "plain"_a, "associated"_a)
      .def("open", &open, "nonce"_a, "sealed"_a, "associated"_a)
      .def("open_into", &open_into, "nonce"_a, "sealed"_a, "associated"_a, "into"_a)
      .def("wipe", &SecretBytes::wipe)
      .def("__len__", &SecretBytes::size)
      .def("__repr__",
           [](const SecretBytes& self) {
             return "<Secret of " + std::to_string(self.size()) + " bytes>";
           })
      .def("__eq__",
           [](const SecretBytes& self, const nb::object& other) -> nb::object {
             if (!nb::isinstance<SecretBytes>(other)) {
               return nb::borrow(Py_NotImplemented);
             }
             return nb::cast(here(self) == nb::cast<const SecretBytes&>(other));
           })
      .def("__reduce_ex__", [](const SecretBytes&, int) -> nb::object {
        throw nb::type_error("a secret cannot be pickled: it stays in its process");
      });

  nb::class_<FreedMemoryOverwritten>(m, "FreedMemoryOverwritten").def(nb::init<>());

  m.def(
      "erase",
      [](const nb::object& memory) {
        const BufferView view(memory, true);
        OPENSSL_cleanse(view.data(), view.size());
      },
      "memory"_a, "Overwrites a writable buffer.");
  m.def(
      "erase_each",
      [](const nb::tuple& buffers) {
        for (const nb::handle each : buffers) {
          if (!PyByteArray_Check(each.ptr())) continue;
          const BufferView view(nb::borrow(each), true);
          OPENSSL_cleanse(view.data(), view.size());
        }
      },
      "buffers"_a, "Overwrites those that are bytearrays.");
  m.def("secret_memory_report", [] {
    const SecretMemoryReport report = secret_memory_report();
    return nb::make_tuple(report.mapped_bytes, report.locked_bytes);
  });
}
