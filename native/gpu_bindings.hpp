// The engine's and the mailbox's devices, and the GPU's arithmetic compiled for the CPU, as Python sees them.
#pragma once

#include <nanobind/nanobind.h>

#include "engine.hpp"
#include "mailbox.hpp"

void bind_gpu(nanobind::class_<sealring::Engine>& engine);
void bind_gpu(nanobind::class_<sealring::Mailbox>& mailbox);
void bind_gpu_functions(nanobind::module_& m);
