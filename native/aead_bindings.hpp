// The GPU's ChaCha20-Poly1305, compiled for the CPU, as Python sees it.
#pragma once

#include <nanobind/nanobind.h>

void bind_gpu_aead(nanobind::module_& m);
