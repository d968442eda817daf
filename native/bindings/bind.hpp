// The parts of sealring._native, each of which adds its own names to the module.
#pragma once

#include <nanobind/nanobind.h>

void bind_codes(nanobind::module_& m);
void bind_secrets(nanobind::module_& m);
void bind_failures(nanobind::module_& m);
void bind_endpoint(nanobind::module_& m);
void bind_engine(nanobind::module_& m);
void bind_mailbox(nanobind::module_& m);
void bind_wires(nanobind::module_& m);
void bind_pieces(nanobind::module_& m);
void bind_vault(nanobind::module_& m);
void bind_gpu_keys(nanobind::module_& m);
void bind_certificates(nanobind::module_& m);
void bind_statements(nanobind::module_& m);
void bind_frames(nanobind::module_& m);
void bind_sockets(nanobind::module_& m);
