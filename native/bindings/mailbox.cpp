// Bindings of messages from one rank to another.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <utility>

#include "bindings/bind.hpp"
#include "bindings/convert.hpp"
#include "bindings/failures.hpp"
#include "bindings/secrets.hpp"
#include "mailbox/mailbox.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace sealring;

void bind_mailbox(nb::module_& m) {
  nb::class_<Message>(m, "Message")
      .def(
          "__init__",
          [](Message* self, bool sends, int peer, uint32_t tag,
             const std::pair<uintptr_t, size_t>& memory, double timeout_s) {
            new (self)
                Message{sends,         peer,     tag, reinterpret_cast<uint8_t*>(memory.first),
                        memory.second, timeout_s};
          },
          "sends"_a, "peer"_a, "tag"_a, "memory"_a, "timeout_s"_a)
      .def_ro("peer", &Message::peer);

  nb::class_<Mailbox, Endpoint>(m, "Mailbox")
      .def(nb::new_([](int rank, int world, const nb::bytes& context, size_t record_bytes,
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
      .def("expect_late_links", &Mailbox::expect_late_links)
      .def(
          "submit",
          [](Mailbox& self, const Message& message, const CallerStream* caller) {
            return without_gil([&] {
              return self.submit(message,
                                 caller == nullptr ? std::nullopt : std::optional(*caller));
            });
          },
          "message"_a, "caller"_a.none(), nb::keep_alive<0, 1>())
      .def("finished", [](Mailbox& self) { return without_gil([&] { return self.finished(); }); })
      .def("release_streams", &Mailbox::release_streams, nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("persistent_kernel_runs", &Mailbox::persistent_kernel_runs)
      .def("account", [](const Mailbox& self) {
        const Mailbox::Stats stats = self.stats();
        nb::dict out;
        out["sealed_bytes"] = stats.sealed_bytes;
        out["opened_bytes"] = stats.opened_bytes;
        out["memory_bytes"] = stats.memory_bytes;
        return out;
      });
}
