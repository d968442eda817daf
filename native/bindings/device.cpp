#include "bindings/device.hpp"

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

const cuda::Driver& driver_or_default(const cuda::Driver* driver) {
  return driver != nullptr ? *driver : cuda::driver();
}

template <typename Owner>
void bind_attach(nb::class_<Owner>& owner) {
  owner.def(
      "attach", [](Owner& self, DetachedDevice& device) { self.attach(std::move(device.device)); },
      "device"_a, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace

void bind_device_of(nb::class_<Mailbox>& mailbox) {
  bind_attach(mailbox);
  mailbox
      .def(
          "release_gpu",
          [](Mailbox& self, double patience_s) {
            return self.release_device(std::chrono::duration<double>(patience_s));
          },
          "patience_s"_a, nb::call_guard<nb::gil_scoped_release>())
      // With a kernel `run_all_batches`, streams can wait for messages.
      .def(
          "attach_cuda",
          [](Mailbox& self, int ordinal, uint64_t seal, uint64_t open, uint64_t run_all_batches,
             const cuda::Driver* driver) {
            auto device = std::make_unique<CudaDevice>(driver_or_default(driver), ordinal,
                                                       self.world(), seal, open);
            if (run_all_batches != 0) device->enable_persistent_kernel(run_all_batches);
            self.attach(std::move(device));
          },
          "ordinal"_a, "seal"_a, "open"_a, "run_all_batches"_a = 0, "driver"_a.none() = nb::none(),
          nb::call_guard<nb::gil_scoped_release>())
      .def("make_stream_wait", &Mailbox::make_stream_wait, "stream"_a, "number"_a, nb::call_guard<nb::gil_scoped_release>())
      .def("is_done", &Mailbox::is_done, "number"_a, nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("persistent_kernel_runs", &Mailbox::persistent_kernel_runs);
}

void bind_device_of(nb::class_<Engine>& engine) {
  bind_attach(engine);
  engine.def("release_gpu", &Engine::release_device, nb::call_guard<nb::gil_scoped_release>());
  // With a kernel `run_one_batch`, collectives can be prepared.
  engine.def(
      "attach_cuda",
      [](Engine& self, int ordinal, uint64_t seal, uint64_t open, uint64_t run_one_batch,
         const cuda::Driver* driver) {
        auto device = std::make_unique<CudaDevice>(driver_or_default(driver), ordinal, self.world(),
                                                   seal, open);
        if (run_one_batch != 0) device->enable_prelaunch(run_one_batch);
        self.attach(std::move(device));
      },
      "ordinal"_a, "seal"_a, "open"_a, "run_one_batch"_a = 0, "driver"_a.none() = nb::none(),
      nb::call_guard<nb::gil_scoped_release>());
  engine.def(
      "add_reduction",
      [](Engine& self, DType dtype, ReduceKind kind, const std::array<uint64_t, 5>& functions) {
        cuda_device(self).add_reduction(dtype, kind,
                            {functions[0], functions[1], functions[2], functions[3], functions[4]});
      },
      "dtype"_a, "kind"_a, "functions"_a, nb::call_guard<nb::gil_scoped_release>());
  engine
      // Wires: an area for peers to read, in the GPU's memory (with the handle that leads to it) or
      // in a mapped file; then the peers' areas, and, when all ranks have them all, their use.
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
      // Channels lead one way each; slots are then in the GPU's own memory alone.
      .def("new_channel_id",
           [](Engine& self) {
             const std::vector<uint8_t> id = self.device()->new_channel_id();
             return nb::bytes(id.data(), id.size());
           })
      .def(
          "offer_channels",
          [](Engine& self, uint32_t slots, size_t payload) {
            self.offer_wires(slots, payload,
                             [&](size_t bytes) { return self.device()->own_area(bytes); });
          },
          "slots"_a, "payload"_a, nb::call_guard<nb::gil_scoped_release>())
      .def(
          "open_channel",
          [](Engine& self, int peer, const nb::bytes& id, bool sends) {
            const std::vector<uint8_t> wanted(data(id), data(id) + id.size());
            const nb::gil_scoped_release released;
            self.open_channel(peer, self.device()->open_channel(wanted, sends), sends);
          },
          "peer"_a, "id"_a, "sends"_a)
      .def("use_wires", &Engine::use_wires, nb::call_guard<nb::gil_scoped_release>())
      .def("drop_wires", &Engine::drop_wires, nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("wired", &Engine::wired)
      .def_prop_ro("channelled", &Engine::channelled)
      // The stream in which prepared collectives are done; 0 where none can be.
      .def_prop_ro("prelaunch_stream",
                   [](Engine& self) -> uint64_t {
                     auto* const cuda = dynamic_cast<CudaDevice*>(self.device());
                     return cuda == nullptr ? 0 : cuda->prelaunch_stream();
                   })
      .def("mark_end", [](Engine& self) { return cuda_device(self).mark_end(); },
           nb::call_guard<nb::gil_scoped_release>())
      .def("is_done", [](Engine& self, uint32_t over) { return cuda_device(self).is_done(over); },
           "over"_a)
      .def("make_stream_wait",
           [](Engine& self, uint64_t stream, uint32_t over) { cuda_device(self).make_stream_wait(stream, over); },
           "stream"_a, "over"_a, nb::call_guard<nb::gil_scoped_release>());
}

void bind_devices(nb::module_& m) {
  nb::class_<DetachedDevice>(m, "Device", "A device that belongs to no engine or mailbox yet.");
  nb::class_<cuda::Driver>(m, "CudaDriver", "The table of CUDA driver functions that a GPU is driven with.");
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
