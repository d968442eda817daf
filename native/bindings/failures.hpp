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

// Calls without the GIL. Returns the Failure, or else the result.
template <typename Function>
nanobind::object without_gil(Function function) {
  namespace nb = nanobind;
  std::optional<Failure> failure;
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
  return failure ? nb::cast(*failure) : nb::cast(std::move(value));
}

}  // namespace sealring
