// Reading from sockets during set-up.
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>

#include "bindings/bind.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

constexpr size_t kMostAtOnce = 16 << 10;

// Returns None if nothing has come, and no bytes if the peer has ended its direction. Never waits, so it
// keeps the GIL: releasing it while other threads want it costs two context switches, many times the time of
// this call.
nb::object receive_now(int descriptor, size_t most, bool peek) {
  std::array<char, kMostAtOnce> bytes;
  const ssize_t count = recv(descriptor, bytes.data(), std::min(most, bytes.size()),
                             MSG_DONTWAIT | (peek ? MSG_PEEK : 0));
  if (count >= 0) return nb::bytes(bytes.data(), static_cast<size_t>(count));
  if (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR) return nb::none();
  PyErr_SetFromErrno(PyExc_OSError);
  throw nb::python_error();
}

}  // namespace

void bind_sockets(nb::module_& m) {
  m.def("receive_now", &receive_now, "descriptor"_a, "most"_a, "peek"_a = false);
}
