// Messages from one rank to another: send and receive, matched by sender and tag.
//
// They have their own links and keys, apart from the collectives': a message must reach a rank that has not
// yet come to the collective its sender is in. A short message travels with its announcement and waits in the
// receiver's memory; a longer one waits with its sender until the receiver accepts it. So a link never
// carries a message that has no room at the receiver, and never blocks.
//
// A message in a GPU's memory is sealed and opened by the GPU (on_device.cpp) and always waits to
// be accepted: no CPU sees its plaintext, however short it is. Streams can wait for it through the
// command queue (device/command_queue.hpp); a thread of the mailbox then moves all messages. That
// thread calls neither CUDA nor Python.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "operation/endpoint.hpp"
#include "operation/records_on_device.hpp"
#include "transport/waiting.hpp"

namespace sealring {

// One message as its caller describes it. The memory must stay valid until the message is done or the mailbox
// is closed.
struct Message {
  static constexpr int kAnyone = -1;

  bool sends;
  int peer;  // kAnyone: received from whichever rank sends one
  uint32_t tag;
  uint8_t* memory;  // only read if the message is sent
  size_t bytes;
  double timeout_s;
};

class Mailbox final : public Endpoint {
 public:
  // A message up to this size travels with its announcement.
  static constexpr size_t kShortBytes = 32u << 10;

  Mailbox(int rank, int world, const Context& context, size_t record_bytes, uint64_t rekey_bytes,
          size_t gpu_record_bytes = kGpuPayload,
          std::shared_ptr<FirstFailure> first_failure = std::make_shared<FirstFailure>(),
          Names names = {});
  ~Mailbox() override;

  // Returns false while a stream has not come to its call: results that streams wait for must be overwritten
  // first.
  bool release_device(std::chrono::duration<double> patience = std::chrono::hours(1)) override;

  // Members without a link may be linked later; messages to them wait for it.
  void expect_late_links() { expects_late_links_ = true; }
  void attach(std::unique_ptr<Device> device) override;

  // With `caller` the memory is on the device. CUDA may then block the calling thread.
  std::shared_ptr<Completion> submit(const Message& message,
                                     const std::optional<CallerStream>& caller = std::nullopt);
  bool persistent_kernel_runs() const;
  // Moves messages that no thread waits for; returns those that are done since the last call and that no
  // thread waited for. Returns nothing when the mailbox is closed.
  std::vector<std::shared_ptr<Completion>> finished();

  void close() override;
  void fail(const Failure& failure) override;
  // Called when the mailbox has ended and its error is recorded: releases the streams that wait for
  // messages which will not come. Without this call they are released half a second later.
  void release_streams();

  struct Stats {
    uint64_t sealed_bytes = 0;
    uint64_t opened_bytes = 0;
    size_t memory_bytes = 0;
  };
  Stats stats() const;

 private:
  using CompletionRef = std::shared_ptr<Completion>;

  // Where a message's payload is when the message is announced. The protocol fixes the numbers.
  enum class PayloadLocation : uint32_t {
    with_sender = 0,
    in_the_announcement = 1,
    on_senders_gpu = 2
  };

  struct UnderWay : Message {
    CompletionRef completion;
    std::optional<uint64_t> ready;  // for device memory: the event of the caller's stream
    Clock::time_point moved;
    bool reached = false;  // the stream has come to the call: the memory may be used
    uint64_t id = 0;  // the number that this rank gave it, if it is sent
    size_t processed = 0;  // bytes that were sealed, or given to be opened
  };
  // A message that a peer announced and that no receive has taken yet.
  struct Arrival {
    int peer;
    uint64_t id;
    uint32_t tag;
    uint64_t bytes;
    PayloadLocation location;
    std::vector<uint8_t> payload;  // if the message is short
  };
  struct Match {
    UnderWay incoming;
    Arrival arrival;
  };
  struct Peer {
    std::deque<UnderWay> unannounced;
    std::map<uint64_t, UnderWay> announced;  // by id; not yet accepted
    std::deque<UnderWay> accepted;  // on their way
    std::deque<UnderWay> leaving;  // sealed, perhaps not yet in the pipe
    std::map<uint64_t, UnderWay> accepting;  // by the sender's id
    std::map<uint64_t, size_t> untaken;  // short messages in the receiver's memory, by id
    size_t untaken_bytes = 0;
    uint64_t sent = 0;  // the last id given
    uint64_t heard = 0;  // the last id announced by the peer
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
  void announce(Link& link, UnderWay message);
  void match_arrivals();
  static bool meets(const UnderWay& waiting, const Arrival& arrival);
  void remember(Arrival arrival);
  void match(std::list<UnderWay>::iterator waiting, Arrival arrival);
  bool accept_matched();
  void accept(UnderWay incoming, const Arrival& arrival);
  size_t piece_bytes(bool on_device) const {
    return (on_device ? gpu_pool_ : pool_).payload_bytes();
  }
  void attached() override;
  void wait_on_host(Completion& message, const HostWait& how) override;
  template <typename Work>
  auto on_this_thread(Work work);
  // With a device (on_device.cpp).
  uint32_t number_for(Lock& lock, const CallerStream& caller);
  void start_persistent_kernel(Lock& lock);
  bool kernel_runs() const;
  void move_for_streams();
  bool poison_results() noexcept;
  void stop_kernel_if_idle();
  bool reached(UnderWay& message);
  // How many records of a group of this size can be on their way from or to its device.
  static size_t most_buffers(size_t world);
  bool may_seal_on_device(const Link& link) const;
  void seal_on_device(Link& link, Header& header, const UnderWay& message);
  void open_on_device(Link& link, const UnderWay& incoming, bool last);
  bool settle();
  void abandon_records() noexcept;
  bool waits_for_device() const { return !records_.empty() || awaits_stream_; }
  void require_same_place(const UnderWay& incoming, const Arrival& arrival) const;
  void sleep(Lock& lock);
  void check_timeouts() const;
  void check_device_timeouts() const;
  void require_lease(Lock& lock);
  void require_link(int peer) const;
  bool pending() const;
  void done(const CompletionRef& message, int peer);
  const Failure& end_with(const Failure& failure);
  void wait_for_driver(Lock& lock);
  // True in a signal handler on the driving thread. The drive is suspended and touches nothing until the
  // handler returns.
  bool drives_here() const { return driving_ && driver_ == std::this_thread::get_id(); }
  void forget_all(const Failure& failure);
  void wake();
  // Puts links that were made late in their place. Called under the lock. A driving thread keeps no reference
  // to an empty place.
  void place_late_links(std::vector<LateLink> links);

  bool driving_ = false;
  std::thread::id driver_;  // valid while `driving_`
  bool expects_late_links_ = false;
  std::vector<Peer> peers_;
  std::list<UnderWay> waiting_;  // for an announcement, in the order of their calls
  std::list<Arrival> arrivals_;
  std::list<Match> matched_;  // not accepted before their memory may be written
  RecordsOnDevice records_;
  uint64_t records_ever_ = 0;
  std::set<CompletionRef> under_way_;
  std::map<CompletionRef, std::span<uint8_t>>
      on_device_;  // messages in device memory, and the memory that each one receives into
  std::thread mover_;
  bool mover_is_done_ = true;
  bool streams_released_ = false;
  bool kernel_starting_ = false;
  size_t posting_ = 0;  // messages that have a number, and are not under way yet
  bool awaits_stream_ = false;  // in the last step some memory was still in use
  bool new_receives_ = false;  // some receives were not yet compared with the arrivals
  std::vector<CompletionRef> news_;  // done since the last call of finished()
  Clock::time_point posted_{};
  Backoff backoff_;
  Stats stats_;
};

}  // namespace sealring
