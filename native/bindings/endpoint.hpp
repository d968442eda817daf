// A device on its way to an engine or a mailbox, and what wires.cpp adds to the engine.
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
