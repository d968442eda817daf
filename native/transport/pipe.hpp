// A pipe carries bytes between two workers: a TCP connection, or two rings of shared memory.
//
// Pipes know nothing of records. Reading copies bytes into the reader's private memory exactly once, so
// no other process can change them after they were checked. Writing copies them out of the writer's private
// memory: a pipe gives out no address in shared memory, so no record can be sealed or opened there.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>

#include "transport/link_memory.hpp"

namespace sealring {

// The other end is gone. The message says how this was noticed.
struct PipeEnded : std::runtime_error {
  explicit PipeEnded(const std::string& what, int error = 0)
      : std::runtime_error(what), error(error) {}
  int error;  // the system's error number; 0 if the other end closed the connection
};

// Shared memory holds values that no honest peer writes.
struct PipeCorrupted : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class Pipe {
 public:
  virtual ~Pipe() = default;

  // Both move as many bytes as can be moved without waiting, and return how many.
  virtual size_t read(std::span<iovec> into) = 0;
  virtual size_t write(std::span<iovec> from) = 0;

  // arm() announces that this end is about to sleep. It returns false if there is something to do after all.
  // Otherwise socket() becomes readable (or writable, for TCP with bytes left to write) when the peer has
  // moved something. disarm() ends the waiting.
  virtual bool arm(bool wants_read, bool wants_write) = 0;
  virtual void disarm() = 0;
  virtual short poll_events(bool wants_read, bool wants_write) const = 0;
  virtual int socket() const = 0;
  // Tells the peer that nothing more will be written.
  virtual void end_writing() = 0;
  // Whether everything written still reaches the peer if this end closes now.
  virtual bool delivered() const = 0;
  virtual size_t memory_bytes() const = 0;
};

// Takes over the socket. It must be connected and non-blocking.
std::unique_ptr<Pipe> make_tcp_pipe(int socket);

// Takes over the socket, which only wakes the peer and shows whether it lives, and both memories: this end's
// own, mapped to write, and the peer's, mapped to read.
std::unique_ptr<Pipe> make_shm_pipe(int socket, LinkMemory own, LinkMemory peer);

}  // namespace sealring
