// Bindings of reductions' kernels and of the wires between GPUs.
#include "bindings/endpoint.hpp"

#include <nanobind/stl/array.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <cstring>
#include <vector>

#include "bindings/bind.hpp"
#include "bindings/convert.hpp"
#include "collective/engine.hpp"
#include "device/cuda/cuda_device.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace sealring;

namespace {

CudaDevice& cuda_device(Engine& engine) {
  auto* const cuda = dynamic_cast<CudaDevice*>(engine.device());
  if (cuda == nullptr) throw std::invalid_argument("the engine has no GPU");
  return *cuda;
}

}  // namespace

void bind_wires_of(nb::class_<Engine, Endpoint>& engine) {
  engine.def(
      "add_reduction",
      [](Engine& self, DType dtype, ReduceKind kind, const std::array<uint64_t, 5>& functions) {
        cuda_device(self).add_reduction(
            dtype, kind, {functions[0], functions[1], functions[2], functions[3], functions[4]});
      },
      "dtype"_a, "kind"_a, "functions"_a, nb::call_guard<nb::gil_scoped_release>());
  engine
      // Wires. First an area that peers read, in the GPU's memory (returns the handle by which peers open it)
      // or in a mapped file; then the peers' areas; then, when all ranks have them all, their use.
      .def(
          "offer_gpu_wires",
          [](Engine& self, uint32_t slots, size_t payload) {
            std::vector<uint8_t> handle;
            {
              const nb::gil_scoped_release released;
              self.offer_wires(slots, payload,
                               [&](size_t bytes) { return self.device()->share(bytes, handle); });
            }
            return nb::bytes(handle.data(), handle.size());
          },
          "slots"_a, "payload"_a)
      .def(
          "open_gpu_wire",
          [](Engine& self, int peer, const nb::bytes& handle) {
            const std::vector<uint8_t> wanted(data(handle), data(handle) + handle.size());
            const nb::gil_scoped_release released;
            self.open_wire(peer, self.device()->reach(wanted));
          },
          "peer"_a, "handle"_a)
      .def(
          "offer_host_wires",
          [](Engine& self, uint32_t slots, size_t payload, int file) {
            self.offer_wires(slots, payload,
                             [&](size_t bytes) { return self.map_wire(file, bytes); });
          },
          "slots"_a, "payload"_a, "file"_a, nb::call_guard<nb::gil_scoped_release>())
      .def(
          "open_host_wire",
          [](Engine& self, int peer, int file, size_t bytes) {
            self.open_wire(peer, self.map_wire(file, bytes));
          },
          "peer"_a, "file"_a, "bytes"_a, nb::call_guard<nb::gil_scoped_release>())
      // Exchanges: areas that no other process can reach, and a meeting of all ranks' GPUs.
      .def("new_meeting_id",
           [](Engine& self) {
             const std::vector<uint8_t> id = self.device()->new_meeting_id(self.world());
             return nb::bytes(id.data(), id.size());
           })
      .def("mark_mixed", &Engine::mark_mixed, nb::call_guard<nb::gil_scoped_release>())
      .def("offer_exchanges", &Engine::offer_exchanges, "half_bytes"_a,
           nb::call_guard<nb::gil_scoped_release>())
      .def(
          "meet",
          [](Engine& self, const nb::bytes& id, const std::vector<int>& peers, double patience_s) {
            const std::vector<uint8_t> wanted(data(id), data(id) + id.size());
            const nb::gil_scoped_release released;
            self.meet(wanted, peers, patience_s);
          },
          "id"_a, "peers"_a, "patience_s"_a)
      .def("connect", &Engine::connect, "peers"_a, "patience_s"_a,
           nb::call_guard<nb::gil_scoped_release>())
      .def("put_late_keys", &Engine::put_late_keys, nb::call_guard<nb::gil_scoped_release>())
      .def("use_wires", &Engine::use_wires, nb::call_guard<nb::gil_scoped_release>())
      .def("drop_wires", &Engine::drop_wires, nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("wired", &Engine::wired)
      .def_prop_ro("wire_slots", &Engine::wire_slots)
      .def_prop_ro("largest_segment", &Engine::largest_segment)
      .def_prop_ro("exchanges", &Engine::exchanges);
}

void bind_wires(nb::module_& m) {
  m.def("exchange_window", &Rounds::window, "levels"_a);
  m.def(
      "wire_area_bytes",
      [](uint32_t slots, size_t payload) { return Wires::area_bytes(slots, payload); }, "slots"_a,
      "payload"_a);
  m.def(
      "cuda_launch",
      [](uint64_t function, uint32_t blocks, uint32_t threads, uint32_t cluster,
         const nb::bytes& argument, uint64_t stream) {
        gpu::launch(cuda::driver(), function, blocks, threads, cluster, data(argument),
                    reinterpret_cast<cuda::Handle>(stream));
      },
      "function"_a, "blocks"_a, "threads"_a, "cluster"_a, "argument"_a, "stream"_a);
}
