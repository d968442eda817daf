// The native core as Python sees it: sealring._native. Nothing here decides anything.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>
#include <openssl/crypto.h>

#include <cstring>

#include "alert.hpp"
#include "engine.hpp"
#include "gpu_bindings.hpp"
#include "mailbox.hpp"
#include "secret_bindings.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace sealring;

namespace {

template <typename Array>
Array exactly(const nb::bytes& bytes, const char* what) {
  Array out;
  if (bytes.size() != out.size()) {
    const std::string message =
        std::string(what) + " must have " + std::to_string(out.size()) + " bytes";
    throw nb::value_error(message.c_str());
  }
  std::memcpy(out.data(), bytes.c_str(), out.size());
  return out;
}

const uint8_t* data(const nb::bytes& bytes) { return reinterpret_cast<const uint8_t*>(bytes.c_str()); }

// (action, slot, peers, message, origin, source, after)
using StepTuple = std::tuple<int, int, std::vector<int>, uint32_t, int, int, std::vector<int>>;

std::unique_ptr<Program> make_program(uint8_t operation, uint8_t algorithm, int rank, int world,
                                      int slots, std::vector<int> scratch,
                                      const std::vector<StepTuple>& steps) {
  std::vector<Step> out;
  for (const auto& [action, slot, peers, message, origin, source, after] : steps) {
    out.push_back({static_cast<Action>(action), slot, peers, message, origin, source, after});
  }
  return std::make_unique<Program>(operation, algorithm, rank, world, slots, std::move(scratch),
                                   std::move(out));
}

nb::dict header_fields(const Header& header) {
  nb::dict out;
  out["kind"] = static_cast<int>(header.kind);
  out["length"] = header.length;
  out["count"] = header.count;
  out["lane"] = header.lane;
  out["generation"] = header.generation;
  out["sender"] = header.sender;
  out["receiver"] = header.receiver;
  out["collective"] = header.collective;
  out["operation"] = header.operation;
  out["dtype"] = header.dtype;
  out["reduction"] = header.reduction;
  out["algorithm"] = header.algorithm;
  out["message"] = header.message;
  out["segment"] = header.segment;
  out["root"] = header.root;
  out["total"] = header.total;
  return out;
}

// What Python needs to build its own exception: (code, peer, collective, reported_by, text).
using FailureFields = std::tuple<int, int, uint64_t, int, std::string>;

nb::tuple failure_fields(const Failure& failure) {
  std::string text = failure.what();
  for (const auto& [rank, view] : failure.views) {
    text += "\n  rank " + std::to_string(rank) + ": " + view;
  }
  return nb::make_tuple(static_cast<int>(failure.code), failure.peer, failure.collective,
                        failure.reported_by, text);
}

// A synchronous call runs on the script's own thread: Ctrl-C must get through. A signal's handler may
// also fork, and then the child returns here too.
bool script_wants_out(const ProcessMark& process) {
  const nb::gil_scoped_acquire held;
  const bool wants_out = PyErr_CheckSignals() != 0;
  process.require("this process group");
  return wants_out;
}

Failure failure_from(const FailureFields& fields) {
  const auto& [code, peer, collective, reported_by, text] = fields;
  Failure failure(static_cast<FailureCode>(code), peer, text);
  failure.collective = collective;
  failure.reported_by = reported_by;
  return failure;
}

// Calls without the GIL; what fails comes back as fields, not as an exception.
template <typename Function>
nb::object without_gil(Function function) {
  std::optional<Failure> failure;
  nb::object result = nb::none();
  {
    decltype(function()) value;
    {
      const nb::gil_scoped_release released;
      try {
        value = function();
      } catch (const Failure& caught) {
        failure = caught;
      }
    }
    if (PyErr_Occurred() != nullptr) throw nb::python_error();
    if (!failure) result = nb::cast(value);
  }
  return nb::make_tuple(failure ? nb::object(failure_fields(*failure)) : nb::none(), result);
}

// Both ends of one key, for whoever measures the cipher itself. It counts its nonces, so that none
// comes twice; the tag is behind the ciphertext.
class Cipher {
 public:
  explicit Cipher(const KeyBytes& key)
      : sealing_(key, Aead::Direction::seal), opening_(key, Aead::Direction::open) {}

  void seal(uintptr_t plain, size_t bytes, uintptr_t sealed) {
    uint8_t* const out = reinterpret_cast<uint8_t*>(sealed);
    sealing_.seal(make_nonce(0, sealed_++), {}, reinterpret_cast<const uint8_t*>(plain), bytes, out,
                  out + bytes);
  }
  // The next one in the order they were sealed; false, and it does not count, on a bad tag.
  bool open(uintptr_t sealed, size_t bytes, uintptr_t plain) {
    const uint8_t* const in = reinterpret_cast<const uint8_t*>(sealed);
    const bool good = opening_.open(make_nonce(0, opened_), {}, in, bytes, in + bytes,
                                    reinterpret_cast<uint8_t*>(plain));
    if (good) ++opened_;
    return good;
  }

 private:
  Aead sealing_, opening_;
  uint64_t sealed_ = 0, opened_ = 0;
};

// What an engine's `prepare` found, for its `run`.
using PreparedFields = std::tuple<uint64_t, uint32_t, uint32_t, uintptr_t>;

Device::Prepared prepared_from(const PreparedFields& fields) {
  const auto& [first, commands, kept, scratch] = fields;
  return {first, commands, kept, reinterpret_cast<uint8_t*>(scratch)};
}

std::optional<Mailbox::OnDevice> on_device(const std::optional<uint64_t>& ready, uint64_t stream,
                                           bool streams_wait) {
  if (!ready) return std::nullopt;
  return Mailbox::OnDevice{*ready, stream, streams_wait};
}

std::vector<Slot> slots_from(const std::vector<std::pair<uintptr_t, size_t>>& slots) {
  std::vector<Slot> out;
  for (const auto& [address, bytes] : slots) out.push_back({reinterpret_cast<uint8_t*>(address), bytes});
  return out;
}

}  // namespace

NB_MODULE(_native, m) {
  // A script may end without destroying its group; what it held is not a leak worth a message.
  nb::set_leak_warnings(false);
  m.doc() = "sealring's native core: records, links, reductions and the CPU engine.";

  bind_secrets(m);

  nb::class_<Program>(m, "Program")
      .def(nb::new_(&make_program), "operation"_a, "algorithm"_a, "rank"_a, "world"_a, "slots"_a,
           "scratch"_a, "steps"_a);

  nb::class_<LinkMemory>(m, "LinkMemory")
      .def(
          "__init__",
          [](LinkMemory* self, int file, size_t ring_bytes, bool writable) {
            new (self) LinkMemory(file, ring_bytes,
                                  writable ? LinkMemory::Access::write : LinkMemory::Access::read);
          },
          "file"_a, "ring_bytes"_a, "writable"_a);

  nb::class_<FirstFailure>(m, "FirstFailure")
      .def(nb::init<>())
      .def(
          "settle",
          [](FirstFailure& self, const FailureFields& failure) {
            return failure_fields(self.settle(failure_from(failure)));
          },
          "failure"_a);

  nb::class_<Lease>(m, "Lease")
      .def(nb::init<>())
      .def("extend", &Lease::extend, "boottime_end"_a, "wall_end"_a)
      .def_prop_ro("ended", &Lease::ended);

  nb::class_<Engine> engine(m, "Engine");
  bind_gpu(engine);
  engine
      .def(
          nb::new_([](int rank, int world, const nb::bytes& context, const SecretBytes& group_key,
                      size_t record_bytes, uint64_t rekey_bytes, std::shared_ptr<FirstFailure> first_failure) {
            if (world < 1 || rank < 0 || rank >= world) throw nb::value_error("rank outside the world");
            if (record_bytes < 16 || record_bytes > kMaxPayload || record_bytes % 16 != 0) {
              throw nb::value_error("record_bytes must be a multiple of 16, at most 1 MiB");
            }
            return owned_here<Engine>(rank, world, exactly<Context>(context, "context"),
                                      key_from(group_key, "group_key"), record_bytes, rekey_bytes,
                                      std::move(first_failure));
          }),
          "rank"_a, "world"_a, "context"_a, "group_key"_a, "record_bytes"_a, "rekey_bytes"_a,
          "first_failure"_a)
      .def("use_lease", [](Engine& self, std::shared_ptr<Lease> lease) { self.use_lease(std::move(lease)); },
           "lease"_a)
      .def(
          "add_tcp_link",
          [](Engine& self, int peer, int socket, const SecretBytes& send_key,
             const SecretBytes& receive_key, const SecretBytes& peer_group_key) {
            self.add_link(peer, make_tcp_pipe(socket), key_from(send_key, "send_key"),
                          key_from(receive_key, "receive_key"),
                          key_from(peer_group_key, "peer_group_key"));
          },
          "peer"_a, "socket"_a, "send_key"_a, "receive_key"_a, "peer_group_key"_a)
      .def(
          "add_shm_link",
          [](Engine& self, int peer, int socket, LinkMemory& own, LinkMemory& theirs,
             const SecretBytes& send_key, const SecretBytes& receive_key,
             const SecretBytes& peer_group_key) {
            self.add_link(peer, make_shm_pipe(socket, std::move(own), std::move(theirs)),
                          key_from(send_key, "send_key"),
                          key_from(receive_key, "receive_key"),
                          key_from(peer_group_key, "peer_group_key"));
          },
          "peer"_a, "socket"_a, "own"_a, "theirs"_a, "send_key"_a, "receive_key"_a,
          "peer_group_key"_a)
      .def(
          "run",
          // None when all went well, else the failure's fields.
          [](Engine& self, const Program& program,
             const std::vector<std::pair<uintptr_t, size_t>>& slots, uint64_t number,
             std::optional<uint64_t> total, uint32_t root, uint8_t dtype, uint8_t reduction, double factor, size_t segment_bytes,
             double timeout_s, std::optional<uint64_t> ready, bool wired,
             const std::optional<PreparedFields>& prepared) -> nb::object {
            Call call{&program, slots_from(slots), number, total, root, static_cast<DType>(dtype),
                      static_cast<ReduceKind>(reduction), factor, segment_bytes, timeout_s,
                      ready.has_value(), ready.value_or(0), wired};
            if (prepared) call.prepared = prepared_from(*prepared);
            call.wants_out = [&self] { return script_wants_out(self.process()); };
            std::optional<Failure> failure;
            {
              nb::gil_scoped_release released;
              try {
                self.run(call);
              } catch (const Failure& caught) {
                failure = caught;
              }
            }
            if (PyErr_Occurred() != nullptr) throw nb::python_error();
            if (failure) return failure_fields(*failure);
            return nb::none();
          },
          "program"_a, "slots"_a, "number"_a, "total"_a.none(), "root"_a, "dtype"_a, "reduction"_a, "factor"_a,
          "segment_bytes"_a, "timeout_s"_a, "ready"_a.none() = nb::none(), "wired"_a = false,
          "prepared"_a.none() = nb::none())
      .def(
          "prepare",
          // None where it is too much to be prepared.
          [](Engine& self, const Program& program,
             const std::vector<std::pair<uintptr_t, size_t>>& slots, uint8_t dtype,
             uint8_t reduction, size_t segment_bytes, bool wired,
             uint64_t stream) -> std::optional<PreparedFields> {
            const Call call{&program, slots_from(slots), 0, std::nullopt, 0,
                            static_cast<DType>(dtype), static_cast<ReduceKind>(reduction), 1.0,
                            segment_bytes, 0.0, true, 0, wired};
            // It may have to wait for another thread in the driver.
            const nb::gil_scoped_release released;
            const Device::Prepared made = self.prepare(call, stream);
            if (made.commands == 0) return std::nullopt;
            return PreparedFields{made.first, made.commands, made.kept,
                                  reinterpret_cast<uintptr_t>(made.scratch)};
          },
          "program"_a, "slots"_a, "dtype"_a, "reduction"_a, "segment_bytes"_a, "wired"_a, "stream"_a)
      .def(
          "spoil",
          [](Engine& self, const Program& program,
             const std::vector<std::pair<uintptr_t, size_t>>& slots, size_t segment_bytes,
             bool wired, const PreparedFields& prepared) {
            Call call{&program, slots_from(slots), 0, std::nullopt, 0, DType::bytes,
                      ReduceKind::none, 1.0, segment_bytes, 0.0, true, 0, wired};
            call.prepared = prepared_from(prepared);
            const nb::gil_scoped_release released;
            self.spoil(call);
          },
          "program"_a, "slots"_a, "segment_bytes"_a, "wired"_a, "prepared"_a)
      .def("prepare_rest", &Engine::prepare_rest, nb::call_guard<nb::gil_scoped_release>())
      .def("close", &Engine::close, nb::call_guard<nb::gil_scoped_release>())
      .def("interrupt", &Engine::interrupt)
      .def(
          "fail",
          [](Engine& self, const FailureFields& failure) {
            const nb::gil_scoped_release released;
            self.fail(failure_from(failure));
          },
          "failure"_a)
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

  nb::class_<Mailbox> mailbox(m, "Mailbox");
  bind_gpu(mailbox);
  mailbox
      .def(
          nb::new_([](int rank, int world, const nb::bytes& context, size_t record_bytes,
             uint64_t rekey_bytes, size_t gpu_record_bytes,
             std::shared_ptr<FirstFailure> first_failure) {
            if (gpu_record_bytes < 16 || gpu_record_bytes > kGpuPayload ||
                gpu_record_bytes % 16 != 0) {
              throw nb::value_error("gpu_record_bytes must be a multiple of 16, at most 256 KiB");
            }
            return owned_here<Mailbox>(rank, world, exactly<Context>(context, "context"),
                                       record_bytes, rekey_bytes, gpu_record_bytes,
                                       std::move(first_failure));
          }),
          "rank"_a, "world"_a, "context"_a, "record_bytes"_a, "rekey_bytes"_a,
          "gpu_record_bytes"_a, "first_failure"_a)
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
              return self.wait(ticket, [&self] { return script_wants_out(self.process()); });
            });
          },
          "ticket"_a)
      .def("finished",
           [](Mailbox& self) { return without_gil([&] { return self.finished(); }); })
      .def("close", &Mailbox::close, nb::call_guard<nb::gil_scoped_release>())
      .def("let_streams_go_on", &Mailbox::let_streams_go_on, nb::call_guard<nb::gil_scoped_release>())
      .def(
          "fail",
          [](Mailbox& self, const FailureFields& failure) {
            const nb::gil_scoped_release released;
            self.fail(failure_from(failure));
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

  nb::class_<Cipher>(m, "Cipher")
      .def(
          "__init__",
          [](Cipher* self, const nb::bytes& key) {
            new (self) Cipher(exactly<KeyBytes>(key, "key"));
          },
          "key"_a)
      .def("seal", &Cipher::seal, "plain"_a, "bytes"_a, "sealed"_a,
           nb::call_guard<nb::gil_scoped_release>())
      .def("open", &Cipher::open, "sealed"_a, "bytes"_a, "plain"_a,
           nb::call_guard<nb::gil_scoped_release>());

  // ---- the pieces, for vectors, fuzzing and the reference's sake --------------------------------

  m.def(
      "reduce",
      [](uintptr_t dst, uintptr_t src, size_t bytes, uint8_t dtype, uint8_t kind) {
        const ReduceFn reduce =
            reduce_function(static_cast<DType>(dtype), static_cast<ReduceKind>(kind));
        if (reduce == nullptr) throw nb::value_error("this dtype has no such reduction");
        reduce(reinterpret_cast<void*>(dst), reinterpret_cast<const void*>(src), bytes);
      },
      "dst"_a, "src"_a, "bytes"_a, "dtype"_a, "kind"_a);
  m.def(
      "aead_seal",
      [](const nb::bytes& key, const nb::bytes& nonce, const nb::bytes& associated,
         const nb::bytes& plain) {
        Aead aead(exactly<KeyBytes>(key, "key"), Aead::Direction::seal, Suite::aes_256_gcm,
                  Aead::Zeros::allowed);
        std::vector<uint8_t> out(plain.size() + kTagBytes);
        aead.seal(exactly<Nonce>(nonce, "nonce"), {data(associated), associated.size()},
                  data(plain), plain.size(), out.data(), out.data() + plain.size());
        return nb::bytes(out.data(), out.size());
      },
      "key"_a, "nonce"_a, "associated"_a, "plain"_a);
  m.def(
      "aead_open",
      [](const nb::bytes& key, const nb::bytes& nonce, const nb::bytes& associated,
         const nb::bytes& sealed) -> nb::object {
        if (sealed.size() < kTagBytes) return nb::none();
        const size_t bytes = sealed.size() - kTagBytes;
        Aead aead(exactly<KeyBytes>(key, "key"), Aead::Direction::open, Suite::aes_256_gcm,
                  Aead::Zeros::allowed);
        std::vector<uint8_t> out(bytes);
        if (!aead.open(exactly<Nonce>(nonce, "nonce"), {data(associated), associated.size()},
                       data(sealed), bytes, data(sealed) + bytes, out.data())) {
          return nb::none();
        }
        return nb::bytes(out.data(), out.size());
      },
      "key"_a, "nonce"_a, "associated"_a, "sealed"_a);
  m.def(
      "ratchet",
      [](const nb::bytes& key) {
        const KeyBytes next = ratchet(exactly<KeyBytes>(key, "key"));
        return nb::bytes(next.data(), next.size());
      },
      "key"_a);
  m.def(
      "parse_header",
      [](const nb::bytes& bytes) -> nb::object {
        Header header;
        if (bytes.size() < kHeaderBytes || !Header::decode(data(bytes), header)) return nb::none();
        return header_fields(header);
      },
      "bytes"_a, "The fields of a record's header, or None where it is none.");
  m.def(
      "parse_alert",
      [](const nb::bytes& bytes, int sender) {
        return failure_fields(decode_alert({data(bytes), bytes.size()}, sender));
      },
      "bytes"_a, "sender"_a);
  bind_gpu_functions(m);
  // Of the library that is called, which need not be the one whose headers were compiled.
  m.def("openssl_version", [] { return std::string(OpenSSL_version(OPENSSL_VERSION)); });
  m.def("openssl_version_number", &OpenSSL_version_num);
#ifdef SEALRING_STATIC_OPENSSL
  m.attr("OPENSSL_BUILT_IN") = true;
#else
  m.attr("OPENSSL_BUILT_IN") = false;
#endif
}
