// Bindings that read certificates and verify members' signatures.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <memory>
#include <utility>
#include <vector>

#include "bindings/bind.hpp"
#include "bindings/convert.hpp"
#include "identity/certificate.hpp"
#include "keys/hexadecimal.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace sealring;

namespace {

// Views of a tuple's `bytes` objects. They are read without the GIL; the tuple keeps the objects alive.
std::vector<der::Bytes> views_of(const nb::tuple& tuple) {
  std::vector<der::Bytes> views;
  for (const nb::handle each : tuple) views.push_back(span_of(nb::cast<nb::bytes>(each)));
  return views;
}

nb::list read_certificates(const nb::tuple& certificates, const nb::tuple& authorities) {
  const std::vector<der::Bytes> views = views_of(certificates);
  std::vector<const Authority*> believed;
  for (const nb::handle each : authorities) believed.push_back(nb::cast<const Authority*>(each));
  std::vector<ReadCertificate> found;
  found.reserve(views.size());
  {
    const nb::gil_scoped_release released;
    Issuers issuers(believed);
    for (const der::Bytes each : views) found.push_back(read_signed(each, issuers));
  }
  nb::list out;
  for (ReadCertificate& each : found) out.append(nb::cast(std::move(each)));
  return out;
}

// The places at which a signature is not by the key of the certificate there.
nb::list wrong_signatures(const nb::tuple& certificates, const nb::tuple& signatures,
                          const nb::bytes& message) {
  if (certificates.size() != signatures.size()) {
    throw nb::value_error("there are not as many signatures as certificates");
  }
  const std::vector<der::Bytes> views = views_of(signatures);
  std::vector<const ReadCertificate*> signers;
  for (const nb::handle each : certificates) {
    signers.push_back(nb::cast<const ReadCertificate*>(each));
  }
  std::vector<size_t> wrong;
  {
    const der::Bytes text = span_of(message);
    const nb::gil_scoped_release released;
    MessageSignatures messages;
    for (size_t i = 0; i < views.size(); ++i) {
      if (!messages.verify(signers[i]->key, views[i], text)) wrong.push_back(i);
    }
  }
  nb::list out;
  for (const size_t each : wrong) out.append(each);
  return out;
}

}  // namespace

void bind_certificates(nb::module_& m) {
  nb::register_exception_translator([](const std::exception_ptr& thrown, void*) {
    try {
      std::rethrow_exception(thrown);
    } catch (const der::NotDer& problem) {
      PyErr_SetString(PyExc_ValueError, problem.what());
    }
  });

  nb::class_<Authority>(m, "Authority")
      .def(
          "__init__",
          [](Authority* self, const nb::bytes& certificate) {
            new (self) Authority(span_of(certificate));
          },
          "certificate"_a);

  nb::class_<ReadCertificate>(m, "ReadCertificate")
      .def_prop_ro("fingerprint",
                   [](const ReadCertificate& self) {
                     return nb::bytes(self.fingerprint.data(), self.fingerprint.size());
                   })
      .def_ro("readable", &ReadCertificate::readable)
      .def_ro("signed", &ReadCertificate::is_signed)
      .def_ro("starts", &ReadCertificate::starts)
      .def_ro("ends", &ReadCertificate::ends)
      .def_prop_ro("problem", [](const ReadCertificate& self) { return self.claims.problem; })
      .def_prop_ro("uri", [](const ReadCertificate& self) { return self.claims.uri; })
      .def_prop_ro("world", [](const ReadCertificate& self) { return self.claims.world; })
      .def_prop_ro("states_constraints",
                   [](const ReadCertificate& self) { return self.claims.states_constraints; })
      .def_prop_ro("is_authority",
                   [](const ReadCertificate& self) { return self.claims.is_authority; })
      .def_prop_ro("foreign",
                   [](const ReadCertificate& self) {
                     return nb::bytes(self.foreign.data(), self.foreign.size());
                   })
      .def_prop_ro("key", [](const ReadCertificate& self) { return hexadecimal(self.claims.key); });

  m.def(
      "read_certificate", [](const nb::bytes& bytes) { return read_any(span_of(bytes)); },
      "certificate"_a, "Of any signer.");
  m.def("read_certificates", &read_certificates, "certificates"_a, "authorities"_a,
        "What they claim is read of those that one of the authorities has signed.");
  m.def("wrong_signatures", &wrong_signatures, "certificates"_a, "signatures"_a, "message"_a,
        "The places of the signatures over the message that are not by the certificates' keys.");
}
