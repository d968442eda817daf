// A device before an engine or a mailbox takes it, and the function by which wires.cpp extends the engine's
// bindings.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>

#include "collective/engine.hpp"

namespace sealring {

// Holds a device until an engine or a mailbox takes it.
struct DetachedDevice {
  std::unique_ptr<Device> device;
};

}  // namespace sealring

void bind_wires_of(nanobind::class_<sealring::Engine, sealring::Endpoint>& engine);
