// The devices of the engine and of the mailbox, as Python sees them.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>

#include "collective/engine.hpp"
#include "mailbox/mailbox.hpp"

namespace sealring {

// Holds a device until an engine or a mailbox takes it.
struct DetachedDevice {
  std::unique_ptr<Device> device;
};

}  // namespace sealring

// Adds to these classes what is about their devices.
void bind_device_of(nanobind::class_<sealring::Engine>& engine);
void bind_device_of(nanobind::class_<sealring::Mailbox>& mailbox);
