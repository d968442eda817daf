// Failures reach Python as data: a call returns the Failure that it ended with.
#pragma once

#include <nanobind/nanobind.h>

#include <optional>
#include <utility>

#include "keys/secret_memory.hpp"
#include "record/failure.hpp"

namespace sealring {

// Whether a signal waits for the script. A synchronous call runs on the script's own thread, and Ctrl-C must
// get through. A signal handler may also fork, and then the child returns here too.
bool signal_pending(const ProcessMark& process);

// Calls the function without the GIL. Returns its result, or the Failure that it threw.
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
