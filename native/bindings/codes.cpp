// Bindings of codes and limits. Python takes them from here and keeps no copies.
#include <cctype>
#include <string>

#include "bindings/bind.hpp"
#include "collective/collective.hpp"
#include "mailbox/mailbox.hpp"
#include "record/alert.hpp"
#include "record/record.hpp"

namespace nb = nanobind;
using namespace sealring;

namespace {

// Makes an enum print as its number, as enum.IntEnum does.
void print_as_number(nb::handle made) {
  const nb::object integer = nb::module_::import_("builtins").attr("int");
  made.attr("__str__") = integer.attr("__repr__");
  made.attr("__format__") = integer.attr("__format__");
}

// Makes an enum with a value for each code from `first` on, named like name_of() in capitals.
template <typename Enum>
nb::enum_<Enum> enum_of_names(nb::module_& m, const char* name, const char* doc, int first) {
  nb::enum_<Enum> made(m, name, doc, nb::is_arithmetic());
  for (int code = first;; ++code) {
    const char* const named = name_of(static_cast<Enum>(code));
    if (named == nullptr) break;
    std::string capitals(named);
    for (char& c : capitals) c = static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
    made.value(capitals.c_str(), static_cast<Enum>(code));
  }
  print_as_number(made);
  return made;
}

}  // namespace

void bind_codes(nb::module_& m) {
  enum_of_names<DType>(m, "DType", "What a tensor's elements are; bound into every record.", 1)
      .def_prop_ro("itemsize", [](DType dtype) { return item_bytes(dtype); });
  enum_of_names<ReduceKind>(m, "ReduceKind", "How contributions are combined.", 0);
  nb::enum_<Action>(m, "Action", "What a step of a program does.", nb::is_arithmetic())
      .value("SEND", Action::send,
             "Seal `slot` under the pair's key; send it to the rank in `peers`.")
      .value("PUBLISH", Action::publish,
             "Seal `slot` once under this rank's group key; send that record to all `peers`.")
      .value("FORWARD", Action::forward,
             "Send the record that step `source` received on to `peers`, sealed as it came.")
      .value("RECEIVE", Action::receive,
             "Open a record from the one rank in `peers` and write it to `slot`.")
      .value("RECEIVE_REDUCE", Action::receive_reduce,
             "Open a record from the one rank in `peers` and reduce it into `slot`.")
      .value("COPY", Action::copy, "Copy slot `source` to `slot`.")
      .value("REDUCE", Action::reduce, "Reduce slot `source` into `slot`.")
      .value("AVERAGE", Action::average, "Divide `slot` by the number of ranks.")
      .value("PREMULTIPLY", Action::premultiply,
             "Multiply `slot` by the factor given with the call.");
  nb::enum_<FailureCode>(m, "FailureCode", "How a group failed; travels in alerts.",
                         nb::is_arithmetic())
      .value("TAMPERED", FailureCode::tampered)
      .value("MISSING", FailureCode::missing)
      .value("REPLAYED", FailureCode::replayed)
      .value("OUT_OF_STEP", FailureCode::out_of_step)
      .value("PEER_LOST", FailureCode::peer_lost)
      .value("PEER_SILENT", FailureCode::peer_silent)
      .value("CLOSED", FailureCode::closed)
      .value("NO_LONGER_ADMITTED", FailureCode::no_longer_admitted);
  nb::enum_<Kind>(m, "RecordKind", nb::is_arithmetic())
      .value("PAIR", Kind::pair)
      .value("GROUP", Kind::group)
      .value("ALERT", Kind::alert)
      .value("BYE", Kind::bye)
      .value("ANNOUNCE", Kind::announce)
      .value("ACCEPT", Kind::accept)
      .value("DATA", Kind::data)
      .value("STATUS", Kind::status)
      .value("FETCHED", Kind::fetched);

  for (const char* name : {"Action", "FailureCode", "RecordKind"}) print_as_number(m.attr(name));

  m.attr("KEY_BYTES") = kKeyBytes;
  m.attr("TAG_BYTES") = kTagBytes;
  m.attr("HEADER_BYTES") = kHeaderBytes;
  m.attr("MAX_PAYLOAD_BYTES") = kMaxPayload;
  m.attr("GPU_PAYLOAD_BYTES") = kGpuPayload;
  m.attr("MAX_ALERT_TEXT_BYTES") = kMaxAlertText;
  m.attr("SEGMENT_WINDOW") = kWindow;
  m.attr("MAX_LANES") = kMaxLanes;
  m.attr("STRIPE_SEGMENTS") = kStripe;
  m.attr("FORWARD_BUDGET_BYTES") = kForwardBudget;
  m.attr("ANYONE") = Message::kAnyone;
}
