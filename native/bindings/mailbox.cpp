// Messages from one rank to another.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <utility>

#include "bindings/bind.hpp"
#include "bindings/convert.hpp"
#include "bindings/device.hpp"
#include "bindings/failures.hpp"
#include "bindings/secrets.hpp"
#include "mailbox/mailbox.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace sealring;

namespace {

std::optional<Mailbox::CallerStream> on_device(const std::optional<uint64_t>& ready, uint64_t stream,
                                           bool streams_wait) {
  if (!ready) return std::nullopt;
  return Mailbox::CallerStream{*ready, stream, streams_wait};
}

}  // namespace

void bind_mailbox(nb::module_& m) {
  nb::class_<Mailbox> mailbox(m, "Mailbox");
  bind_device_of(mailbox);
  mailbox
      .def(
          nb::new_([](int rank, int world, const nb::bytes& context, size_t record_bytes,
             uint64_t rekey_bytes, size_t gpu_record_bytes,
             std::shared_ptr<FirstFailure> first_failure, const Names& names) {
            if (gpu_record_bytes < 16 || gpu_record_bytes > kGpuPayload ||
                gpu_record_bytes % 16 != 0) {
              throw nb::value_error("gpu_record_bytes must be a multiple of 16, at most 256 KiB");
            }
            return owned_here<Mailbox>(rank, world, exactly<Context>(context, "context"),
                                       record_bytes, rekey_bytes, gpu_record_bytes,
                                       std::move(first_failure), names);
          }),
          "rank"_a, "world"_a, "context"_a, "record_bytes"_a, "rekey_bytes"_a,
          "gpu_record_bytes"_a, "first_failure"_a, "names"_a)
      .def("use_lease", [](Mailbox& self, std::shared_ptr<Lease> lease) { self.use_lease(std::move(lease)); },
           "lease"_a)
      .def(
          "add_tcp_link",
          [](Mailbox& self, int peer, int socket, const SecretBytes& send_key,
             const SecretBytes& receive_key) {
            self.add_link(peer, make_tcp_pipe(socket), key_from(send_key, "send_key"),
                          key_from(receive_key, "receive_key"));
          },
          "peer"_a, "socket"_a, "send_key"_a, "receive_key"_a)
      .def(
          "add_shm_link",
          [](Mailbox& self, int peer, int socket, LinkMemory& own, LinkMemory& theirs,
             const SecretBytes& send_key, const SecretBytes& receive_key) {
            self.add_link(peer, make_shm_pipe(socket, std::move(own), std::move(theirs)),
                          key_from(send_key, "send_key"),
                          key_from(receive_key, "receive_key"));
          },
          "peer"_a, "socket"_a, "own"_a, "theirs"_a, "send_key"_a, "receive_key"_a)
      .def(
          "send",
          [](Mailbox& self, int peer, uint32_t tag, uintptr_t from, size_t bytes, double timeout_s,
             std::optional<uint64_t> ready, uint64_t stream, bool streams_wait) {
            return without_gil([&] {
              return self.send(peer, tag, reinterpret_cast<const uint8_t*>(from), bytes, timeout_s,
                               on_device(ready, stream, streams_wait));
            });
          },
          "peer"_a, "tag"_a, "address"_a, "bytes"_a, "timeout_s"_a, "ready"_a.none(), "stream"_a = 0,
          "streams_wait"_a = false)
      .def(
          "receive",
          [](Mailbox& self, int peer, uint32_t tag, uintptr_t into, size_t bytes, double timeout_s,
             std::optional<uint64_t> ready, uint64_t stream, bool streams_wait) {
            return without_gil([&] {
              return self.receive(peer, tag, reinterpret_cast<uint8_t*>(into), bytes, timeout_s,
                                  on_device(ready, stream, streams_wait));
            });
          },
          "peer"_a, "tag"_a, "address"_a, "bytes"_a, "timeout_s"_a, "ready"_a.none(), "stream"_a = 0,
          "streams_wait"_a = false)
      .def("number_of", &Mailbox::number_of, "ticket"_a, nb::call_guard<nb::gil_scoped_release>())
      .def(
          "wait",
          [](Mailbox& self, Mailbox::Ticket ticket) {
            return without_gil([&] {
              return self.wait(ticket, [&self] { return signal_pending(self.process()); });
            });
          },
          "ticket"_a)
      .def("finished",
           [](Mailbox& self) { return without_gil([&] { return self.finished(); }); })
      .def("close", &Mailbox::close, nb::call_guard<nb::gil_scoped_release>())
      .def("release_streams", &Mailbox::release_streams, nb::call_guard<nb::gil_scoped_release>())
      .def(
          "fail",
          [](Mailbox& self, const Failure& failure) {
            const nb::gil_scoped_release released;
            self.fail(failure);
          },
          "failure"_a)
      .def("account", [](const Mailbox& self) {
        const Mailbox::Stats stats = self.stats();
        nb::dict out;
        out["sealed_bytes"] = stats.sealed_bytes;
        out["opened_bytes"] = stats.opened_bytes;
        out["memory_bytes"] = stats.memory_bytes;
        return out;
      });

}
