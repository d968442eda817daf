#include "gpu_bindings.hpp"

#include <nanobind/stl/array.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <cstring>
#include <vector>

#include "cuda_device.hpp"
#include "engine.hpp"
#include "gpu_arithmetic.hpp"
#include "host_device.hpp"
#include "host_driver.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace sealring;

namespace {

const uint8_t* data(const nb::bytes& bytes) {
  return reinterpret_cast<const uint8_t*>(bytes.c_str());
}

template <typename Array>
Array exactly(const nb::bytes& bytes, const char* what) {
  Array out;
  if (bytes.size() != out.size()) {
    throw nb::value_error((std::string(what) + " has a wrong length").c_str());
  }
  std::memcpy(out.data(), bytes.c_str(), out.size());
  return out;
}

nb::bytes seal(const nb::bytes& key, const nb::bytes& nonce, const nb::bytes& associated,
               const nb::bytes& plain) {
  std::vector<uint8_t> out(plain.size() + kTagBytes);
  gpu_seal(exactly<KeyBytes>(key, "key"), exactly<Nonce>(nonce, "nonce"),
           {data(associated), associated.size()}, data(plain), plain.size(), out.data(),
           out.data() + plain.size());
  return nb::bytes(out.data(), out.size());
}

nb::object open(const nb::bytes& key, const nb::bytes& nonce, const nb::bytes& associated,
                const nb::bytes& sealed) {
  if (sealed.size() < kTagBytes) return nb::none();
  const size_t bytes = sealed.size() - kTagBytes;
  std::vector<uint8_t> out(bytes);
  if (!gpu_open(exactly<KeyBytes>(key, "key"), exactly<Nonce>(nonce, "nonce"),
                {data(associated), associated.size()}, data(sealed), bytes, data(sealed) + bytes,
                out.data())) {
    return nb::none();
  }
  return nb::bytes(out.data(), out.size());
}

template <typename Owner>
HostDevice& host_device(Owner& owner) {
  auto* host = dynamic_cast<HostDevice*>(owner.device());
  if (host == nullptr) throw nb::value_error("it has no such device");
  return *host;
}

CudaDevice& cuda_device(Engine& engine) {
  auto* const cuda = dynamic_cast<CudaDevice*>(engine.device());
  if (cuda == nullptr) throw std::invalid_argument("the engine has no GPU");
  return *cuda;
}

template <typename Owner>
void bind_devices(nb::class_<Owner>& owner) {
  owner
      // The GPU's part played by this CPU, for tests.
      .def(
          "attach_host", [](Owner& self, int lag) { self.attach(std::make_unique<HostDevice>(lag, self.world())); },
          "lag"_a, nb::call_guard<nb::gil_scoped_release>())
      .def("host_fail", [](Owner& self) { host_device(self).fail_from_now_on(); })
      .def("host_log", [](Owner& self) { return host_device(self).log(); });
}

}  // namespace

void bind_gpu(nb::class_<Mailbox>& mailbox) {
  bind_devices(mailbox);
  mailbox
      .def(
          "release_gpu",
          [](Mailbox& self, double patience_s) {
            return self.release_device(std::chrono::duration<double>(patience_s));
          },
          "patience_s"_a, nb::call_guard<nb::gil_scoped_release>())
      // With a kernel `carry`, streams can wait for messages.
      .def(
          "attach_cuda",
          [](Mailbox& self, int ordinal, uint64_t seal, uint64_t open, uint64_t carry) {
            auto device = std::make_unique<CudaDevice>(cuda::driver(), ordinal, self.world(), seal, open);
            if (carry != 0) device->employ_porter(carry);
            self.attach(std::move(device));
          },
          "ordinal"_a, "seal"_a, "open"_a, "carry"_a = 0, nb::call_guard<nb::gil_scoped_release>())
      // A GPU whose driver this CPU plays, for tests; returns a stream of its.
      .def(
          "attach_host_driver",
          [](Mailbox& self) {
            auto device = std::make_unique<CudaDevice>(host_driver(), 0, self.world(),
                                                       host_function(HostKernel::seal),
                                                       host_function(HostKernel::open));
            device->employ_porter(host_function(HostKernel::carry));
            self.attach(std::move(device));
            return reinterpret_cast<uint64_t>(new HostStream);
          },
          nb::call_guard<nb::gil_scoped_release>())
      .def("hold", &Mailbox::hold, "stream"_a, "number"_a, nb::call_guard<nb::gil_scoped_release>())
      .def("is_over", &Mailbox::is_over, "number"_a, nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("porter_is_in", &Mailbox::porter_is_in);
}

void bind_gpu(nb::class_<Engine>& engine) {
  bind_devices(engine);
  engine.def("release_gpu", &Engine::release_device, nb::call_guard<nb::gil_scoped_release>());
  // With a kernel `serve`, collectives can be prepared.
  engine.def(
      "attach_cuda",
      [](Engine& self, int ordinal, uint64_t seal, uint64_t open, uint64_t serve) {
        auto device = std::make_unique<CudaDevice>(cuda::driver(), ordinal, self.world(), seal, open);
        if (serve != 0) device->hire(serve);
        self.attach(std::move(device));
      },
      "ordinal"_a, "seal"_a, "open"_a, "serve"_a = 0, nb::call_guard<nb::gil_scoped_release>());
  engine.def(
      "add_reduction",
      [](Engine& self, uint8_t dtype, uint8_t kind, const std::array<uint64_t, 5>& functions) {
        cuda_device(self).add_reduction(static_cast<DType>(dtype), static_cast<ReduceKind>(kind),
                            {functions[0], functions[1], functions[2], functions[3], functions[4]});
      },
      "dtype"_a, "kind"_a, "functions"_a, nb::call_guard<nb::gil_scoped_release>());
  engine
      // A GPU whose driver this CPU plays, for tests: told ahead what to do, or launched.
      .def(
          "attach_host_driver",
          [](Engine& self, bool ahead) {
            auto device = std::make_unique<CudaDevice>(host_driver(), 0, self.world(),
                                                       host_function(HostKernel::seal),
                                                       host_function(HostKernel::open));
            for (int dtype = 1; dtype <= 16; ++dtype) {
              for (int kind = 1; kind <= 9; ++kind) {
                const auto type = static_cast<DType>(dtype);
                const auto reduction = static_cast<ReduceKind>(kind);
                if (!reducible(type, reduction)) continue;
                const auto of = [&](HostKernel kernel) { return host_function(kernel, type, reduction); };
                device->add_reduction(type, reduction,
                                      {of(HostKernel::open_reduce), of(HostKernel::reduce),
                                       of(HostKernel::average), of(HostKernel::premultiply),
                                       of(HostKernel::serve)});
              }
            }
            if (ahead) device->hire(host_function(HostKernel::serve));
            self.attach(std::move(device));
          },
          "ahead"_a, nb::call_guard<nb::gil_scoped_release>())
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
      .def_prop_ro("shift_stream",
                   [](Engine& self) -> uint64_t {
                     auto* const cuda = dynamic_cast<CudaDevice*>(self.device());
                     return cuda == nullptr ? 0 : cuda->shift_stream();
                   })
      .def("mark_over", [](Engine& self) { return cuda_device(self).mark_over(); },
           nb::call_guard<nb::gil_scoped_release>())
      .def("is_over", [](Engine& self, uint32_t over) { return cuda_device(self).is_over(over); },
           "over"_a)
      .def("hold",
           [](Engine& self, uint64_t stream, uint32_t over) { cuda_device(self).hold(stream, over); },
           "stream"_a, "over"_a, nb::call_guard<nb::gil_scoped_release>());
}

void bind_gpu_functions(nb::module_& m) {
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
  m.def("gpu_aead_seal", &seal, "key"_a, "nonce"_a, "associated"_a, "plain"_a,
        "ChaCha20-Poly1305 by the arithmetic that GPUs run.");
  m.def("gpu_aead_open", &open, "key"_a, "nonce"_a, "associated"_a, "sealed"_a);
  m.def(
      "gpu_key",
      [](const nb::bytes& key) {
        const KeyBytes made = gpu_key(exactly<KeyBytes>(key, "key"));
        return nb::bytes(made.data(), made.size());
      },
      "key"_a);
}
