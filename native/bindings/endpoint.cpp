// Bindings of what collectives and messages share: links, a device, completions.
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>

#include <memory>
#include <optional>
#include <utility>

#include "bindings/bind.hpp"
#include "bindings/convert.hpp"
#include "bindings/endpoint.hpp"
#include "bindings/failures.hpp"
#include "bindings/secrets.hpp"
#include "device/cuda/cuda_device.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace sealring;

namespace {

void add_link(Endpoint& self, int peer, std::unique_ptr<Pipe> pipe, const SecretBytes& send_key,
              const SecretBytes& receive_key, const SecretBytes* peer_group_key) {
  std::optional<KeyBytes> group_key;
  if (peer_group_key != nullptr) group_key = key_from(*peer_group_key, "peer_group_key");
  self.add_link(peer, std::move(pipe), key_from(send_key, "send_key"),
                key_from(receive_key, "receive_key"), group_key ? &*group_key : nullptr);
}

nb::object value_of(const RecordHash& hash) {
  const std::optional<RecordHash::Value> value = hash.value();
  if (!value) return nb::none();
  return nb::make_tuple(value->records, nb::bytes(value->digest.data(), value->digest.size()));
}

nb::list commitments(const Endpoint& self) {
  nb::list found;
  for (const auto& link : self.commitments()) {
    found.append(
        nb::make_tuple(link->peer, link->lane, value_of(link->sent), value_of(link->received)));
  }
  return found;
}

}  // namespace

void bind_endpoint(nb::module_& m) {
  nb::class_<DetachedDevice>(m, "Device", "A device that belongs to no engine or mailbox yet.");
  nb::class_<cuda::Driver>(m, "CudaDriver",
                           "The table of CUDA driver functions that a GPU is driven with.");

  nb::class_<LinkMemory>(m, "LinkMemory")
      .def(
          "__init__",
          [](LinkMemory* self, int file, size_t ring_bytes, bool writable) {
            new (self) LinkMemory(file, ring_bytes,
                                  writable ? LinkMemory::Access::write : LinkMemory::Access::read);
          },
          "file"_a, "ring_bytes"_a, "writable"_a);

  nb::class_<CallerStream>(m, "CallerStream")
      .def(
          "__init__",
          [](CallerStream* self, uint64_t ready, uint64_t stream, bool streams_wait) {
            new (self) CallerStream{ready, stream, streams_wait};
          },
          "ready"_a = 0, "stream"_a = 0, "streams_wait"_a = false);

  nb::class_<Completion>(m, "Completion")
      .def(
          "wait_on_host",
          // Returns None on success, else the failure.
          [](Completion& self, uint64_t number, double timeout_s) {
            return without_gil([&]() -> std::optional<Failure> {
              const ProcessMark& process = self.owner().process();
              self.wait_on_host(
                  {[&process] { return signal_pending(process); }, number, timeout_s});
              return std::nullopt;
            });
          },
          "number"_a = 0, "timeout_s"_a = 0.0)
      .def("wait_on_stream", &Completion::wait_on_stream, "stream"_a,
           nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("streams_wait", &Completion::streams_wait)
      .def_prop_ro("done",
                   [](const Completion& self) {
                     if (!self.streams_wait()) return self.done();
                     const nb::gil_scoped_release released;
                     return self.done();
                   })
      .def_prop_ro("error", &Completion::error)
      .def_prop_ro("peer", &Completion::peer);

  nb::class_<Dismissal>(m, "Dismissal")
      .def("say", &Dismissal::say, nb::call_guard<nb::gil_scoped_release>());

  nb::class_<Endpoint>(m, "Endpoint")
      .def(
          "use_lease",
          [](Endpoint& self, std::shared_ptr<Lease> lease) { self.use_lease(std::move(lease)); },
          "lease"_a)
      .def(
          "add_tcp_link",
          [](Endpoint& self, int peer, int socket, const SecretBytes& send_key,
             const SecretBytes& receive_key, const SecretBytes* peer_group_key) {
            add_link(self, peer, make_tcp_pipe(socket), send_key, receive_key, peer_group_key);
          },
          "peer"_a, "socket"_a, "send_key"_a, "receive_key"_a,
          "peer_group_key"_a.none() = nb::none())
      .def(
          "add_shm_link",
          [](Endpoint& self, int peer, int socket, LinkMemory& own, LinkMemory& theirs,
             const SecretBytes& send_key, const SecretBytes& receive_key,
             const SecretBytes* peer_group_key) {
            add_link(self, peer, make_shm_pipe(socket, std::move(own), std::move(theirs)), send_key,
                     receive_key, peer_group_key);
          },
          "peer"_a, "socket"_a, "own"_a, "theirs"_a, "send_key"_a, "receive_key"_a,
          "peer_group_key"_a.none() = nb::none())
      .def(
          "add_member",
          [](Endpoint& self, int peer, const SecretBytes& group_key) {
            self.add_member(peer, key_from(group_key, "group_key"));
          },
          "peer"_a, "group_key"_a)
      .def(
          "add_late_link",
          [](Endpoint& self, int peer, int socket, LinkMemory* own, LinkMemory* theirs,
             const SecretBytes& send_key, const SecretBytes& receive_key) {
            auto pipe = own == nullptr || theirs == nullptr
                            ? make_tcp_pipe(socket)
                            : make_shm_pipe(socket, std::move(*own), std::move(*theirs));
            LateLink link{peer, std::move(pipe), key_from(send_key, "send_key"),
                          key_from(receive_key, "receive_key")};
            std::optional<Dismissal> rest = self.add_late_link(std::move(link));
            return rest ? owned_here<Dismissal>(std::move(*rest)) : nullptr;
          },
          "peer"_a, "socket"_a, "own"_a.none(), "theirs"_a.none(), "send_key"_a, "receive_key"_a)
      .def(
          "attach",
          [](Endpoint& self, DetachedDevice& device) { self.attach(std::move(device.device)); },
          "device"_a, nb::call_guard<nb::gil_scoped_release>())
      // Streams can wait only with a kernel that reads commands: `run_one_batch` for collectives,
      // `run_all_batches` for messages.
      .def(
          "attach_cuda",
          [](Endpoint& self, int ordinal, uint64_t seal, uint64_t open, uint64_t command_kernel,
             const cuda::Driver* driver) {
            auto device = std::make_unique<CudaDevice>(driver != nullptr ? *driver : cuda::driver(),
                                                       ordinal, self.world(), seal, open);
            const bool collectives = dynamic_cast<Engine*>(&self) != nullptr;
            if (command_kernel != 0 && collectives) device->enable_prelaunch(command_kernel);
            if (command_kernel != 0 && !collectives)
              device->enable_persistent_kernel(command_kernel);
            self.attach(std::move(device));
          },
          "ordinal"_a, "seal"_a, "open"_a, "command_kernel"_a = 0, "driver"_a.none() = nb::none(),
          nb::call_guard<nb::gil_scoped_release>())
      .def(
          "release_gpu",
          [](Endpoint& self, double patience_s) {
            return self.release_device(std::chrono::duration<double>(patience_s));
          },
          "patience_s"_a, nb::call_guard<nb::gil_scoped_release>())
      .def("commitments", &commitments)
      .def("close", &Endpoint::close, nb::call_guard<nb::gil_scoped_release>())
      .def("fail", &Endpoint::fail, "failure"_a, nb::call_guard<nb::gil_scoped_release>());
}
