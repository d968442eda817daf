// The module sealring._stand_ins, for tests only: a device and a CUDA driver played by the CPU, and the GPU's
// arithmetic compiled for the CPU. Python hands the device and the driver to sealring._native, whose code
// then runs on them as on a GPU.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <vector>

#include "bindings/convert.hpp"
#include "bindings/endpoint.hpp"
#include "stand_ins/gpu_arithmetic.hpp"
#include "stand_ins/host_device.hpp"
#include "stand_ins/host_driver.hpp"
#include "stand_ins/host_nccl.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace sealring;

namespace {

nb::bytes seal(const nb::bytes& key, const nb::bytes& nonce, const nb::bytes& associated,
               const nb::bytes& plain) {
  std::vector<uint8_t> out(plain.size() + kTagBytes);
  gpu_seal(exactly<KeyBytes>(key, "key"), exactly<Nonce>(nonce, "nonce"), span_of(associated),
           data(plain), plain.size(), out.data(), out.data() + plain.size());
  return nb::bytes(out.data(), out.size());
}

nb::object open(const nb::bytes& key, const nb::bytes& nonce, const nb::bytes& associated,
                const nb::bytes& sealed) {
  if (sealed.size() < kTagBytes) return nb::none();
  const size_t bytes = sealed.size() - kTagBytes;
  std::vector<uint8_t> out(bytes);
  if (!gpu_open(exactly<KeyBytes>(key, "key"), exactly<Nonce>(nonce, "nonce"), span_of(associated),
                data(sealed), bytes, data(sealed) + bytes, out.data())) {
    return nb::none();
  }
  return nb::bytes(out.data(), out.size());
}

}  // namespace

NB_MODULE(_stand_ins, m) {
  nb::set_leak_warnings(false);
  nb::module_::import_("sealring._native");  // has the types that both modules use

  nb::enum_<HostKernel>(m, "Kernel", nb::is_arithmetic())
      .value("SEAL", HostKernel::seal)
      .value("OPEN", HostKernel::open)
      .value("OPEN_REDUCE", HostKernel::open_reduce)
      .value("REDUCE", HostKernel::reduce)
      .value("AVERAGE", HostKernel::average)
      .value("PREMULTIPLY", HostKernel::premultiply)
      .value("RUN_ONE_BATCH", HostKernel::run_one_batch)
      .value("RUN_ALL_BATCHES", HostKernel::run_all_batches);
  m.def(
      "host_function",
      [](HostKernel kernel, DType dtype, ReduceKind kind) {
        return host_function(kernel, dtype, kind);
      },
      "kernel"_a, "dtype"_a = DType::bytes, "kind"_a = ReduceKind::none);
  m.def("host_driver", &host_driver, nb::rv_policy::reference);
  m.def("change_next_exchange", &HostMeeting::change_next_for, "receiver"_a);
  m.def("messages_exchanged", &HostMeeting::sent);
  m.def("new_stream", [] { return reinterpret_cast<uint64_t>(new HostStream); });
  m.def(
      "put",
      [](uint64_t stream, const nb::callable& task) {
        PyObject* const held = task.inc_ref().ptr();
        const nb::gil_scoped_release released;
        reinterpret_cast<HostStream*>(stream)->put([held] {
          const nb::gil_scoped_acquire acquired;
          nb::steal<nb::callable>(held)();
        });
      },
      "stream"_a, "task"_a);

  nb::class_<HostDeviceProbe>(m, "Probe")
      .def(nb::new_([] { return std::make_shared<HostDeviceProbe>(); }))
      .def("fail", [](HostDeviceProbe& self) { self.broken = true; })
      .def_ro("log", &HostDeviceProbe::log);
  m.def(
      "host_device",
      [](int lag, int world, std::shared_ptr<HostDeviceProbe> probe) {
        return DetachedDevice{std::make_unique<HostDevice>(lag, world, std::move(probe))};
      },
      "lag"_a, "world"_a, "probe"_a);

  m.def("gpu_aead_seal", &seal, "key"_a, "nonce"_a, "associated"_a, "plain"_a);
  m.def("gpu_aead_open", &open, "key"_a, "nonce"_a, "associated"_a, "sealed"_a);
}
