// Bindings of members' statements and bundles.
#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "bindings/bind.hpp"
#include "bindings/buffer.hpp"
#include "bindings/convert.hpp"
#include "bindings/secrets.hpp"
#include "handshake/bundle.hpp"
#include "handshake/statements.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace sealring;

namespace {

// Views of several Python objects' memory, for as long as this object exists.
class Buffers {
 public:
  explicit Buffers(const nb::tuple& objects) {
    for (const nb::handle each : objects) {
      views_.push_back(std::make_unique<BufferView>(nb::borrow(each), false));
      spans_.emplace_back(views_.back()->data(), views_.back()->size());
    }
  }
  std::span<const der::Bytes> spans() const { return spans_; }

 private:
  std::vector<std::unique_ptr<BufferView>> views_;
  std::vector<der::Bytes> spans_;
};

template <typename Array>
nb::bytes bytes_of(const Array& array) {
  return nb::bytes(array.data(), array.size());
}

nb::list rows_of(const Statements& self) {
  nb::list rows;
  for (size_t i = 0; i < self.size(); ++i) {
    const Statement& each = self[i];
    rows.append(nb::make_tuple(each.rank, nb::str(each.instance.data(), each.instance.size()),
                               bytes_of(each.host), bytes_of(each.addresses),
                               bytes_of(each.certificate), bytes_of(each.fingerprint),
                               each.contributes));
  }
  return rows;
}

nb::object encode_bundle(const nb::dict& entries, const nb::bytes& head) {
  std::vector<std::unique_ptr<BufferView>> views;
  std::vector<BundleEntry> rows;
  for (const auto& [rank, entry] : entries) {
    views.push_back(std::make_unique<BufferView>(nb::borrow(entry), false));
    rows.push_back({nb::cast<uint32_t>(rank), {views.back()->data(), views.back()->size()}});
  }
  std::ranges::sort(rows, {}, &BundleEntry::rank);
  const auto size = static_cast<Py_ssize_t>(head.size() + bundle_size(rows));
  const nb::object out = nb::steal(PyByteArray_FromStringAndSize(nullptr, size));
  if (!out.is_valid()) throw nb::python_error();
  auto* const start = reinterpret_cast<uint8_t*>(PyByteArray_AsString(out.ptr()));
  std::copy_n(data(head), head.size(), start);
  write_bundle(rows, start + head.size());
  return out;
}

nb::dict parse_bundle(const nb::object& raw, size_t start) {
  const BufferView view(raw, false);
  const der::Bytes whole(view.data(), view.size());
  nb::dict entries;
  for (const BundleEntry& each : read_bundle(whole.subspan(std::min(start, whole.size())))) {
    const nb::object entry =
        nb::steal(PyByteArray_FromStringAndSize(reinterpret_cast<const char*>(each.bytes.data()),
                                                static_cast<Py_ssize_t>(each.bytes.size())));
    if (!entry.is_valid()) throw nb::python_error();
    entries[nb::int_(each.rank)] = entry;
  }
  return entries;
}

}  // namespace

void bind_statements(nb::module_& m) {
  nb::register_exception_translator([](const std::exception_ptr& thrown, void*) {
    try {
      std::rethrow_exception(thrown);
    } catch (const MalformedStatement& problem) {
      PyErr_SetString(PyExc_ValueError, problem.what());
    }
  });

  m.attr("MAX_STATEMENT_BYTES") = kMostOfAnEntry;
  m.def("encode_bundle", &encode_bundle, "entries"_a, "head"_a);
  m.def("parse_bundle", &parse_bundle, "raw"_a, "start"_a);

  nb::class_<Statements>(m, "Statements")
      .def(
          "__init__",
          [](Statements* self, const nb::tuple& encoded) {
            new (self) Statements(Buffers(encoded).spans());
          },
          "encoded"_a)
      .def("rows", &rows_of)
      .def(
          "transcript",
          [](const Statements& self, const nb::bytes& before) {
            return bytes_of(self.transcript(span_of(before)));
          },
          "before"_a)
      .def(
          "first_wrong_value",
          [](const Statements& self, const nb::bytes& before, const nb::tuple& shown) {
            return self.first_wrong_value(span_of(before), Buffers(shown).spans());
          },
          "before"_a, "shown"_a)
      .def(
          "group_secret",
          [](Statements& self, const nb::bytes& transcript, const nb::bytes& purpose,
             size_t bytes) {
            return self.group_secret({transcript.c_str(), transcript.size()},
                                     {purpose.c_str(), purpose.size()}, bytes);
          },
          "transcript"_a, "purpose"_a, "bytes"_a);
}
