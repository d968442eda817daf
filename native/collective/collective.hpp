// One collective under way: which segments are open, which steps are done, what may run next.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <vector>

#include "collective/exchanging.hpp"
#include "collective/program.hpp"
#include "device/device.hpp"
#include "device/wires.hpp"
#include "operation/records_on_device.hpp"
#include "record/lease.hpp"
#include "reduce/reduce.hpp"
#include "transport/buffers.hpp"
#include "transport/farewell.hpp"
#include "transport/late_links.hpp"
#include "transport/link.hpp"
#include "transport/waiting.hpp"

namespace sealring {

struct Slot {
  uint8_t* data;
  size_t bytes;
};

// What to run, and on which memory.
struct Call {
  const Program* program;
  std::vector<Slot> slots;
  uint64_t number = 0;
  // Bytes of the user's tensor; all ranks must say the same. Without it each message states its own
  // length, on which its two ends must agree.
  std::optional<uint64_t> total;
  uint32_t root;  // 0 where the operation has none; all ranks must say the same
  DType dtype;
  ReduceKind reduction;
  double factor;
  size_t segment_bytes;
  double timeout_s = 0;
  // The slots are in a device's memory; nothing there is touched before `ready`, an event of its.
  bool on_device = false;
  uint64_t ready = 0;
  // Its records go by way of the wires. All ranks must say the same, and none pass records on.
  bool wired = false;
  // The device was given its part ahead, and streams wait for it.
  Submitted submitted{};
  // The tensor is shared among so many lanes, of which this is one. All ranks must say the same.
  size_t lanes = 1;
  size_t lane = 0;
  // Asked now and then while waiting: true if the caller wants to be gone (a signal came).
  std::function<bool()> signal_pending = [] { return false; };
};

struct Stats {
  uint64_t sealed_bytes = 0;
  uint64_t opened_bytes = 0;
  uint64_t sealed_records = 0;
  uint64_t opened_records = 0;
  uint64_t forwarded_records = 0;
  uint64_t sleeps = 0;
  uint64_t scratch_bytes = 0;  // the most that any one collective needed
  // Nanoseconds, as the clock on the wall counts them. What is left of run_ns went into moving
  // records: system calls, copies out of shared memory, headers.
  uint64_t run_ns = 0;
  uint64_t seal_ns = 0;
  uint64_t open_ns = 0;
  uint64_t reduce_ns = 0;  // and copying into the user's tensor
  uint64_t wait_ns = 0;    // nothing could move
  uint64_t transfer_ns() const { return run_ns - seal_ns - open_ns - reduce_ns - wait_ns; }
};

// Segments in the air at once. More hide each other's latency, fewer stay in the cache.
inline constexpr uint64_t kWindow = 4;
// A lane takes so many segments in a row. So what has no more of them needs one lane alone, on all ranks,
// whatever these know of each other's tensors.
inline constexpr uint64_t kStripe = kWindow;
// Sealed records that may wait on one link to be passed on, in bytes.
inline constexpr uint64_t kForwardBudget = 8u << 20;

// How a call's slots are cut, and how many pieces there are at once.
struct Cut {
  Cut(const Call& call, const Wires* wires);
  // Of this lane.
  uint64_t segments_of(int step) const;
  // A segment's number in the whole tensor, and back.
  uint64_t position(uint64_t segment) const;
  uint64_t segment_at(uint64_t position) const;
  bool in_this_lane(uint64_t position) const {
    return position / kStripe % call.lanes == call.lane;
  }
  // How many of a call's lanes have any segment.
  static size_t lanes_used(const Call& call);
  size_t slot_bytes(int slot) const;
  size_t segment_length(uint64_t position, int slot) const;
  size_t scratch_bytes() const { return window * program.scratch.size() * segment_bytes; }
  // The parts of its slots that this rank writes.
  std::vector<std::span<uint8_t>> results() const;

  const Call& call;
  const Program& program;
  const size_t segment_bytes;
  uint64_t segments;           // of the longest slot that a step uses
  uint64_t full_segments = 0;  // how many of them have every step
  uint64_t steps = 0;          // in all segments
  uint64_t window = 1;         // segments in the air at once
};

// This rank's last collectives, the one under way among them.
using History = std::deque<View>;

View view_of(const Call& call);

class Collective {
 public:
  // Links that come while it runs, and what gives them their place among the links.
  struct Latecomers {
    LateLinks& links;
    std::function<void(std::vector<LateLink>)> place;
  };

  // Without a device the slots are in this process's own memory.
  Collective(const Call& call, Links& links, Keyring& keyring, BufferPool& pool, Device* device,
             Wires* wires, Stats& stats, Backoff& patience, const History& history,
             const std::atomic<bool>& interrupted, const Lease* lease,
             const Latecomers& latecomers);
  ~Collective();

  // Returns when this rank's part is done and everything it had to send has left.
  void run();

 private:
  struct Segment {
    uint64_t number = 0;    // in this lane
    uint64_t position = 0;  // in the whole tensor
    std::vector<int> waits;        // how many steps each step still waits for
    std::vector<bool> done;
    size_t left = 0;               // steps that are not done
    std::vector<uint8_t> scratch;
  };
  struct Task {
    Segment* segment;
    int step;
  };

  void open_segments();
  void finish(Segment& segment, int step);
  void enable(Segment& segment, int step);

  bool run_tasks();
  void run_task(Segment& segment, int index);
  void compute(Segment& segment, const Step& step);
  void seal(Segment& segment, int index);
  void publish(Header& header, const uint8_t* plain, const std::vector<int>& peers);
  bool receive_all();
  bool receive(Link& link);
  bool take_data(Link& link);
  void apply(Segment& segment, int step, const uint8_t* plain);
  bool flush_all();
  bool take_latecomers();
  bool sees_who_is_late() const;
  // With a device (on_device.cpp).
  uint64_t queue_of(uint64_t segment) const { return segment % window_.size(); }
  void compute_on_device(Segment& segment, const Step& step);
  SealingKey& device_key(const Step& step) const;
  bool device_has_room(const Segment& segment, const Step& step) const;
  void seal_on_device(Header& header, const Segment& segment, const uint8_t* plain, int index);
  bool open_on_device(Link& link, Segment& segment, int index);
  Wires::Way way_to(int peer) const {
    return wires_ == nullptr ? Wires::Way::link : wires_->way_to(peer);
  }
  bool exchanges_with(int peer) const { return way_to(peer) == Wires::Way::exchange; }
  bool announce(Link& link, Segment& segment, int index);
  bool open_arrived();
  // It still has something to do for this rank.
  bool device_is_busy() const {
    return !on_device_.empty() || (exchanging_ && exchanging_->under_way());
  }
  void on_fetched(Link& link);
  void send_fetched(Link& link);
  bool settle();
  void require_same_place(const Link& link) const;
  void wait();
  void sleep();
  void check_interrupt() const;
  void require_lease() const;
  View view() const;
  const Names& names() const { return keyring_.names; }
  void on_status(Link& link);
  void send_status();
  // Whether a peer reads this lane in this collective. What it does not read would fill the pipe.
  bool reads_here(int peer) const { return call_.lane == 0 || in_this_lane_.contains(peer); }
  [[noreturn]] void disagree(int peer, int other, const View& theirs, const View& mine) const;
  [[noreturn]] void throw_timeout();

  uint8_t* at(Segment& segment, int slot) const;
  size_t length(const Segment& segment, int slot) const;
  uint64_t total_of(int slot) const;
  size_t first_length(const Segment& segment, int slot) const {
    return std::min(length(segment, slot), device_ == nullptr ? SIZE_MAX : kGpuPayload);
  }
  // A device may seal a segment as a run of records. Their headers count on from the first one's.
  uint64_t number_of(uint64_t position) const { return position * records_per_segment_; }
  bool same_call(const Header& header, uint64_t total) const;
  void require_same(const Link& link) const;
  Header new_header(const Segment& segment, const Step& step) const;

  const Call& call_;
  const Program& program_;
  const Cut cut_;
  Links& links_;
  Keyring& keyring_;
  BufferPool& pool_;
  Device* const device_;
  Wires* const wires_;
  Stats& stats_;
  Backoff& backoff_;
  const History& history_;
  const std::atomic<bool>& interrupted_;
  const Latecomers& latecomers_;
  const Lease* const lease_;  // null where no broker admits this worker
  unsigned rounds_ = 0;
  const ReduceFn reduce_;

  const uint64_t records_per_segment_;
  uint64_t opened_ = 0;    // segments started
  uint64_t finished_ = 0;  // segments done; they finish in any order
  uint64_t oldest_ = 0;    // the first segment that is not done
  std::vector<Segment> window_;
  std::deque<Task> tasks_;
  std::vector<bool> blocked_;   // links over which a task waits to go, by rank
  std::vector<uint64_t> expected_;  // records still to come, by rank
  std::set<int> in_this_lane_;     // ranks that a further lane has records for, or from
  std::set<int> area_readers_;     // ranks that fetch records from our area
  RecordsOnDevice on_device_;
  std::optional<Exchanging> exchanging_;  // where devices exchange records
  std::optional<Clock::time_point> status_sent_;  // the last time
  bool device_idle_ = false;  // and the device has nothing of it left to do
  BufferRef plain_;             // where a record is opened whose ciphertext goes on
};

}  // namespace sealring
