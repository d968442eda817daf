// Messages from one rank to another: send and receive, matched by sender and tag.
//
// They have links and keys of their own, apart from the collectives': a message must reach a rank
// that has not yet come to the collective its sender is in. A short message travels with its
// announcement and waits in the receiver's memory; a longer one waits with its sender until the
// receiver accepts it. So a link never carries a message that has no room at the receiver,
// and never blocks.
//
// A message in a GPU's memory is sealed and opened by the GPU (on_device.cpp) and always waits to
// be accepted: no CPU sees its plaintext, however short it is. Streams can wait for it by its number
// (device/cuda/persistent_kernel.hpp); a thread of the mailbox then moves all messages. That thread
// calls neither CUDA nor Python.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "transport/buffers.hpp"
#include "device/device.hpp"
#include "transport/farewell.hpp"
#include "record/first_failure.hpp"
#include "record/lease.hpp"
#include "transport/link.hpp"
#include "keys/secret_memory.hpp"
#include "transport/waiting.hpp"

namespace sealring {

// In a forked child every call throws ForkedProcess, but for those that end the group: these do nothing,
// since the group and its connections are the parent's.
class Mailbox {
 public:
  using Ticket = uint64_t;
  static constexpr int kAnyone = -1;
  // A message up to this size travels with its announcement.
  static constexpr size_t kShortBytes = 32u << 10;

  Mailbox(int rank, int world, const Context& context, size_t record_bytes, uint64_t rekey_bytes,
          size_t gpu_record_bytes = kGpuPayload,
          std::shared_ptr<FirstFailure> first_failure = std::make_shared<FirstFailure>(),
          Names names = {});
  ~Mailbox();

  void add_link(int peer, std::unique_ptr<Pipe> pipe, const KeyBytes& send_key,
                const KeyBytes& receive_key);

  // Ends the group when the lease has ended. Before the first message.
  void use_lease(std::shared_ptr<const Lease> lease) { lease_ = std::move(lease); }

  // What seals and opens the messages that are not in the CPU's memory.
  void attach(std::unique_ptr<Device> device);
  Device* device() const { return device_.get(); }
  // Gives back what an ended group has of it. False where that cannot be yet: a stream has not come to
  // its call, and what streams wait for is still to be overwritten.
  bool release_device(std::chrono::duration<double> patience = std::chrono::hours(1));
  int world() const { return static_cast<int>(links_.size()); }

  // For memory on the device: the stream of the caller, and the event after which the memory may be
  // used (0: at once).
  struct CallerStream {
    CallerStream(uint64_t ready, uint64_t stream = 0, bool streams_wait = false)
        : ready(ready), stream(stream), streams_wait(streams_wait) {}
    uint64_t ready;
    uint64_t stream;
    bool streams_wait;  // streams are to wait for the message, if that is possible now
  };
  // The memory must stay until the message is done, or the mailbox closed.
  Ticket send(int peer, uint32_t tag, const uint8_t* from, size_t bytes, double timeout_s,
              std::optional<CallerStream> place = std::nullopt);
  Ticket receive(int peer, uint32_t tag, uint8_t* into, size_t bytes, double timeout_s,
                 std::optional<CallerStream> place = std::nullopt);
  // What streams can wait for, if they can and the message is not done.
  uint32_t number_of(Ticket ticket) const;
  // What the stream is given from now on waits for the message, in the calling thread's context.
  void make_stream_wait(uint64_t stream, uint32_t number);
  bool is_done(uint32_t number) const;
  bool persistent_kernel_runs() const;

  // Drives the traffic until this message is done; returns the rank at its other end, or nothing if
  // finished() has handed it out already.
  std::optional<int> wait(Ticket ticket, const std::function<bool()>& signal_pending);
  // Moves messages that no thread waits for; returns those that are done since the last call, with the
  // rank at their other end. Returns nothing when the mailbox is closed.
  std::vector<std::pair<Ticket, int>> finished();

  // Ends in order: nothing more is sent, the peers are told, the keys wiped.
  void close();
  // Ends with a failure that was seen elsewhere.
  void fail(const Failure& failure);
  // Called when the mailbox has ended and its error is recorded: releases the streams that wait for
  // messages which will not come. Without this call they are released half a second later.
  void release_streams();

  struct Stats {
    uint64_t sealed_bytes = 0;
    uint64_t opened_bytes = 0;
    size_t memory_bytes = 0;
  };
  Stats stats() const;
  const ProcessMark& process() const { return process_; }

 private:
  using Lock = std::unique_lock<std::mutex>;

  // Where a message is when it is announced. The numbers are the protocol's.
  enum class PayloadLocation : uint32_t { with_sender = 0, in_the_announcement = 1, on_senders_gpu = 2 };

  struct Outgoing {
    Ticket ticket;
    uint32_t tag;
    const uint8_t* from;
    size_t bytes;
    std::optional<uint64_t> ready;  // of a device's memory: what to wait for, 0 when it was reached
    double timeout_s;
    Clock::time_point moved;
    uint64_t id = 0;
    size_t sealed = 0;
  };
  struct Incoming {
    Ticket ticket;
    int peer;
    uint32_t tag;
    uint8_t* into;
    size_t bytes;
    std::optional<uint64_t> ready;
    double timeout_s;
    Clock::time_point moved;
    size_t have = 0;
  };
  // Announced by a peer, and not yet received here.
  struct Arrival {
    int peer;
    uint64_t id;
    uint32_t tag;
    uint64_t bytes;
    PayloadLocation location;
    std::vector<uint8_t> payload;  // of a short one
  };
  struct Match {
    Incoming incoming;
    Arrival arrival;
  };
  // A message of the device's that is not done.
  struct UnderWay {
    uint32_t number;          // 0 where no stream can wait for it
    std::span<uint8_t> into;  // of one that is received
  };
  // A record that the device was given, to seal or to open, in the order in which it will be done.
  struct InFlight {
    Device::Ticket ticket;
    BufferRef record;
    int peer;
    bool opens;
    std::optional<Ticket> ends;  // the message received whose last record it is
    double timeout_s;
    Clock::time_point moved;
  };
  struct Peer {
    std::deque<Outgoing> unannounced;
    std::map<uint64_t, Outgoing> announced;  // by id; not yet accepted
    std::deque<Outgoing> accepted;           // on their way
    std::deque<Outgoing> leaving;            // sealed, perhaps not yet in the pipe
    std::map<uint64_t, Incoming> accepting;  // by the sender's id
    std::map<uint64_t, size_t> untaken;      // short ones in the receiver's memory, by id
    size_t untaken_bytes = 0;
    uint64_t sent = 0;                       // the last id given
    uint64_t heard = 0;                      // the last id announced by the peer
  };

  void drive(Lock& lock, const std::function<bool()>& enough,
             const std::function<bool()>& signal_pending);
  bool step();
  bool read(Link& link);
  void on_announcement(Link& link);
  void on_acceptance(Link& link);
  bool take_data(Link& link);
  bool write(Link& link);
  bool send_data(Link& link);
  void announce(Link& link, Outgoing message);
  void match_arrivals();
  static bool meets(const Incoming& waiting, const Arrival& arrival);
  void remember(Arrival arrival);
  void match(std::list<Incoming>::iterator waiting, Arrival arrival);
  bool accept_matched();
  void accept(Incoming incoming, const Arrival& arrival);
  size_t piece_bytes(bool on_device) const {
    return (on_device ? gpu_pool_ : pool_).payload_bytes();
  }
  template <typename Work>
  auto with_device(Work work);
  // With a device (on_device.cpp).
  uint32_t number_for(Lock& lock, const std::optional<CallerStream>& place);
  static std::optional<uint64_t> ready_of(const std::optional<CallerStream>& place, uint32_t number);
  void start_persistent_kernel(Lock& lock);
  bool kernel_runs() const;
  void move_for_streams();
  template <typename Call>
  void call_without(Lock& lock, Call call);
  bool poison_results() noexcept;
  void stop_kernel_if_idle();
  bool reached(std::optional<uint64_t>& ready);
  void seal_on_device(Link& link, Header& header, const Outgoing& message);
  void open_on_device(Link& link, const Incoming& incoming, bool last);
  bool settle();
  void abandon_in_flight() noexcept;
  bool waits_for_device() const { return !in_flight_.empty() || awaits_stream_; }
  void require_same_place(const Incoming& incoming, const Arrival& arrival) const;
  void sleep(Lock& lock);
  void check_timeouts() const;
  void check_device_timeouts() const;
  void require_process() const { process_.require("this process group"); }
  const Names& names() const { return keyring_.names; }
  void require_alive() const;
  void require_lease(Lock& lock);
  void require_link(int peer) const;
  void require_device(const std::optional<CallerStream>& place) const;
  bool pending() const;
  Ticket new_ticket(const std::optional<CallerStream>& place, uint32_t number, std::span<uint8_t> into);
  void done(Ticket ticket, int peer);
  const Failure& end_with(const Failure& failure);
  void wait_for_driver(Lock& lock);
  void wipe();
  void wake();

  const ProcessMark process_;
  const int rank_;
  const uint64_t rekey_bytes_;
  mutable std::mutex lock_;
  std::condition_variable changed_;
  bool driving_ = false;
  bool closed_ = false;
  const std::shared_ptr<FirstFailure> first_failure_;
  std::shared_ptr<const Lease> lease_;
  std::optional<Failure> failure_;
  int wake_;  // an eventfd

  std::unique_ptr<Device> device_;  // first: buffers lie in its memory
  BufferPool pool_;
  BufferPool gpu_pool_;
  Keyring keyring_;
  Links links_;
  std::vector<Peer> peers_;
  std::list<Incoming> waiting_;  // for an announcement, in the order of their calls
  std::list<Arrival> arrivals_;
  std::list<Match> matched_;       // not accepted before their memory may be written
  std::deque<InFlight> in_flight_;
  uint64_t in_flight_count_ = 0;
  std::map<Ticket, UnderWay> on_device_;
  std::thread mover_;
  bool mover_is_done_ = true;
  bool streams_released_ = false;
  bool kernel_starting_ = false;
  size_t posting_ = 0;  // messages that have a number, and are not under way yet
  size_t calling_ = 0;  // threads that call CUDA for the kernel
  bool awaits_stream_ = false;   // in the last step some memory was still in use
  bool new_receives_ = false;  // that have not looked among the arrivals yet
  std::map<Ticket, std::optional<int>> tickets_;  // all that are not yet handed out
  std::vector<Ticket> news_;
  Ticket last_ticket_ = 0;
  Clock::time_point posted_{};
  Backoff backoff_;
  Stats stats_;
};

}  // namespace sealring
