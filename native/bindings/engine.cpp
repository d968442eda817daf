// Bindings of the engine that runs collectives, and of its programs and calls.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/bind.hpp"
#include "bindings/convert.hpp"
#include "bindings/endpoint.hpp"
#include "bindings/failures.hpp"
#include "bindings/secrets.hpp"
#include "collective/engine.hpp"
#include "device/cuda/cuda_device.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace sealring;

namespace {

// (action, slot, peers, message, origin, source, after, level)
using StepTuple =
    std::tuple<Action, int, std::vector<int>, uint32_t, int, int, std::vector<int>, uint32_t>;

std::unique_ptr<Program> make_program(uint8_t operation, uint8_t algorithm, int rank, int world,
                                      int slots, std::vector<int> scratch,
                                      const std::vector<StepTuple>& steps, uint32_t levels) {
  std::vector<Step> out;
  for (const auto& [action, slot, peers, message, origin, source, after, level] : steps) {
    out.push_back({action, slot, peers, message, origin, source, after, level});
  }
  return std::make_unique<Program>(operation, algorithm, rank, world, slots, std::move(scratch),
                                   std::move(out), levels);
}

// A copy of the call for memory of the same length at another address.
Call moved_to(const Call& like, uintptr_t address, uint64_t number, double timeout_s,
              std::function<bool()> signal_pending) {
  Call call = like;
  const uintptr_t first = reinterpret_cast<uintptr_t>(like.slots.at(0).data);
  for (Slot& slot : call.slots) {
    slot.data =
        reinterpret_cast<uint8_t*>(reinterpret_cast<uintptr_t>(slot.data) - first + address);
  }
  call.number = number;
  call.timeout_s = timeout_s;
  call.signal_pending = std::move(signal_pending);
  return call;
}

}  // namespace

void bind_engine(nb::module_& m) {
  nb::class_<Program>(m, "Program")
      .def(nb::new_(&make_program), "operation"_a, "algorithm"_a, "rank"_a, "world"_a, "slots"_a,
           "scratch"_a, "steps"_a, "levels"_a = 1);

  nb::class_<Call>(m, "Call").def(
      "__init__",
      [](Call* self, const Program& program, const std::vector<std::pair<uintptr_t, size_t>>& slots,
         std::optional<uint64_t> total, uint32_t root, DType dtype, ReduceKind reduction,
         double factor, size_t segment_bytes, bool wired, size_t lanes) {
        std::vector<Slot> memory;
        for (const auto& [address, bytes] : slots) {
          memory.push_back({reinterpret_cast<uint8_t*>(address), bytes});
        }
        new (self) Call{.program = &program,
                        .slots = std::move(memory),
                        .total = total,
                        .root = root,
                        .dtype = dtype,
                        .reduction = reduction,
                        .factor = factor,
                        .segment_bytes = segment_bytes,
                        .wired = wired,
                        .lanes = lanes};
      },
      "program"_a, "slots"_a, nb::kw_only(), "total"_a.none(), "root"_a, "dtype"_a, "reduction"_a,
      "factor"_a, "segment_bytes"_a, "wired"_a, "lanes"_a = 1, nb::keep_alive<1, 2>());

  nb::class_<Engine, Endpoint> engine(m, "Engine");
  bind_wires_of(engine);
  engine
      .def(nb::new_([](int rank, int world, const nb::bytes& context, const SecretBytes& group_key,
                       size_t record_bytes, uint64_t rekey_bytes,
                       std::shared_ptr<FirstFailure> first_failure, const Names& names) {
             if (world < 1 || rank < 0 || rank >= world)
               throw nb::value_error("rank outside the world");
             if (record_bytes < 16 || record_bytes > kMaxPayload || record_bytes % 16 != 0) {
               throw nb::value_error("record_bytes must be a multiple of 16, at most 1 MiB");
             }
             return owned_here<Engine>(rank, world, exactly<Context>(context, "context"),
                                       key_from(group_key, "group_key"), record_bytes, rekey_bytes,
                                       std::move(first_failure), names);
           }),
           "rank"_a, "world"_a, "context"_a, "group_key"_a, "record_bytes"_a, "rekey_bytes"_a,
           "first_failure"_a, "names"_a)
      .def(
          "submit",
          [](Engine& self, const Call& call, const CallerStream* caller) {
            // submit() may wait for another thread in the CUDA driver, so then the GIL is released. Otherwise
            // the GIL is kept: getting it back could take as long as a collective.
            std::optional<nb::gil_scoped_release> released;
            if (caller != nullptr && caller->streams_wait) released.emplace();
            return self.submit(call, caller == nullptr ? std::nullopt : std::optional(*caller));
          },
          "call"_a, "caller"_a.none(), nb::keep_alive<0, 1>(), nb::keep_alive<0, 2>())
      // Runs a call like an earlier one, whose first slot begins at another address. Returns None on success,
      // else the failure.
      .def(
          "run_at",
          [](Engine& self, const Call& like, uintptr_t address, uint64_t number, double timeout_s) {
            return without_gil([&]() -> std::optional<Failure> {
              const ProcessMark& process = self.process();
              self.run(moved_to(like, address, number, timeout_s,
                                [&process] { return signal_pending(process); }));
              return std::nullopt;
            });
          },
          "like"_a, "address"_a, "number"_a, "timeout_s"_a)
      .def(
          "add_lane_link",
          [](Engine& self, size_t lane, int peer, int socket, LinkMemory* own, LinkMemory* theirs) {
            self.add_lane_link(lane, peer,
                               own == nullptr || theirs == nullptr
                                   ? make_tcp_pipe(socket)
                                   : make_shm_pipe(socket, std::move(*own), std::move(*theirs)));
          },
          "lane"_a, "peer"_a, "socket"_a, "own"_a.none(), "theirs"_a.none(),
          nb::call_guard<nb::gil_scoped_release>())
      .def("complete_lanes", &Engine::complete_lanes, "peers"_a,
           nb::call_guard<nb::gil_scoped_release>())
      .def("drop_lanes", &Engine::drop_lanes, "peers"_a, nb::call_guard<nb::gil_scoped_release>())
      .def("launch_rest", &Engine::launch_rest, nb::call_guard<nb::gil_scoped_release>())
      .def("mark_end", &Engine::mark_end, "collective"_a, nb::call_guard<nb::gil_scoped_release>())
      .def("release_streams", &Engine::release_streams, "collective"_a,
           nb::call_guard<nb::gil_scoped_release>())
      // The stream of the prelaunched kernels; 0 if there are none.
      .def_prop_ro("prelaunch_stream",
                   [](Engine& self) -> uint64_t {
                     auto* const cuda = dynamic_cast<CudaDevice*>(self.device());
                     return cuda == nullptr ? 0 : cuda->prelaunch_stream();
                   })
      .def("interrupt", &Engine::interrupt)
      .def_prop_ro("runs_here", &Engine::runs_here)
      .def("sealed_and_opened", &Engine::sealed_and_opened)
      .def("account", [](const Engine& self) {
        const Engine::Account account = self.account();
        nb::dict out;
        out["sealed_bytes"] = account.stats.sealed_bytes;
        out["opened_bytes"] = account.stats.opened_bytes;
        out["sealed_records"] = account.stats.sealed_records;
        out["opened_records"] = account.stats.opened_records;
        out["forwarded_records"] = account.stats.forwarded_records;
        out["sleeps"] = account.stats.sleeps;
        const auto seconds = [](uint64_t nanoseconds) {
          return static_cast<double>(nanoseconds) * 1e-9;
        };
        out["run_s"] = seconds(account.stats.run_ns);
        out["seal_s"] = seconds(account.stats.seal_ns);
        out["open_s"] = seconds(account.stats.open_ns);
        out["reduce_s"] = seconds(account.stats.reduce_ns);
        out["transfer_s"] = seconds(account.stats.transfer_ns());
        out["wait_s"] = seconds(account.stats.wait_ns);
        out["waited_s"] = account.waited_s;
        out["rekeys"] = account.rekeys;
        out["memory_bytes"] = account.memory_bytes;
        return out;
      });
}
