// Failures cross the border as data: a call returns the Failure that it ended with.
#pragma once

#include <nanobind/nanobind.h>

#include <optional>
#include <utility>

#include "keys/secret_memory.hpp"
#include "record/failure.hpp"

namespace sealring {

// A synchronous call runs on the script's own thread: Ctrl-C must get through. A signal's handler may
// also fork, and then the child returns here too.
bool signal_pending(const ProcessMark& process);

// Calls without the GIL. Returns (failure or None, result or None).
template <typename Function>
nanobind::object without_gil(Function function) {
  namespace nb = nanobind;
  std::optional<Failure> failure;
  nb::object result = nb::none();
  {
    decltype(function()) value;
    {
      const nb::gil_scoped_release released;
      try {
        value = function();
      } catch (const Failure& caught) {
        failure = caught;
      }
    }
    if (PyErr_Occurred() != nullptr) throw nb::python_error();
    if (!failure) result = nb::cast(value);
  }
  return nb::make_tuple(failure ? nb::cast(*failure) : nb::none(), result);
}

}  // namespace sealring
