// The Python module sealring._native. It only calls the bindings; nothing is decided here.
#include "bindings/bind.hpp"

NB_MODULE(_native, m) {
  // A script may end without destroying its group. What it still held is no leak that needs a message.
  nanobind::set_leak_warnings(false);
  m.doc() =
      "sealring's native core: records, links, reductions, collectives, messages and sealed files.";
  bind_codes(m);
  bind_secrets(m);
  bind_failures(m);
  bind_endpoint(m);
  bind_engine(m);
  bind_mailbox(m);
  bind_wires(m);
  bind_pieces(m);
  bind_vault(m);
  bind_gpu_keys(m);
  bind_certificates(m);
  bind_statements(m);
  bind_frames(m);
  bind_sockets(m);
}
