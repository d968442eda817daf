// Bindings for sealing frames, and for receiving and opening them from a socket.
#include <sys/socket.h>

#include <cerrno>

#include "bindings/bind.hpp"
#include "bindings/buffer.hpp"
#include "bindings/convert.hpp"
#include "bindings/secrets.hpp"
#include "handshake/frames.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace sealring;

namespace {

FrameStart start_of(const nb::bytes& start) {
  return exactly<FrameStart>(start, "the start of a frame");
}

nb::bytes seal(FrameSealer& self, const nb::object& plain) {
  const BufferView view(plain, false);
  std::vector<uint8_t> out(FrameSealer::sealed_size(view.size()));
  self.seal({view.data(), view.size()}, out.data());
  return nb::bytes(out.data(), out.size());
}

// Returns None while the frame has not come completely. Never waits, so it keeps the GIL (sockets.cpp).
nb::object receive(FrameOpener& self, int descriptor) {
  while (!self.whole()) {
    const std::span<uint8_t> room = self.room();
    const ssize_t count = recv(descriptor, room.data(), room.size(), MSG_DONTWAIT);
    if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return nb::none();
    if (count <= 0) {
      if (count == 0) errno = ECONNRESET;
      PyErr_SetFromErrno(PyExc_OSError);
      throw nb::python_error();
    }
    self.filled(static_cast<size_t>(count));
  }
  const nb::object plain =
      nb::steal(PyByteArray_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(self.plain_size())));
  if (!plain.is_valid()) throw nb::python_error();
  self.open(reinterpret_cast<uint8_t*>(PyByteArray_AsString(plain.ptr())));
  return plain;
}

}  // namespace

void bind_frames(nb::module_& m) {
  nb::register_exception_translator([](const std::exception_ptr& thrown, void*) {
    try {
      std::rethrow_exception(thrown);
    } catch (const MalformedFrame& problem) {
      PyErr_SetString(PyExc_ValueError, problem.what());
    }
  });

  m.attr("FRAME_BYTES") = kMostInAFrame;
  nb::class_<FrameSealer>(m, "FrameSealer")
      .def(
          "__init__",
          [](FrameSealer* self, const SecretBytes& key, const nb::bytes& start) {
            new (self) FrameSealer(key_from(key, "this secret"), start_of(start));
          },
          "key"_a, "start"_a)
      .def("seal", &seal, "plain"_a)
      .def("wipe", &FrameSealer::wipe);
  nb::class_<FrameOpener>(m, "FrameOpener")
      .def(
          "__init__",
          [](FrameOpener* self, const SecretBytes& key, const nb::bytes& start) {
            new (self) FrameOpener(key_from(key, "this secret"), start_of(start));
          },
          "key"_a, "start"_a)
      .def("receive", &receive, "descriptor"_a)
      .def("wipe", &FrameOpener::wipe);
}
