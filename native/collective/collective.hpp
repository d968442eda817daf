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

// A call of a collective: the program to run, its memory and its settings.
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
  // True if the slots are in a device's memory. That memory is not touched before the device's event `ready`.
  bool on_device = false;
  uint64_t ready = 0;
  // True if the records travel over the wires. All ranks must agree on it, and no rank forwards records.
  bool wired = false;
  // Set if kernels were launched ahead for this call and streams wait for it.
  Submitted submitted{};
  // The tensor is divided among `lanes` lanes, and this call runs number `lane`. All ranks must have the same
  // `lanes`.
  size_t lanes = 1;
  size_t lane = 0;
  // Polled while waiting. Returns true if a signal came and the caller wants to leave.
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
  // Nanoseconds of wall-clock time. The rest of run_ns was spent on moving records: system calls, copies out
  // of shared memory, headers.
  uint64_t run_ns = 0;
  uint64_t seal_ns = 0;
  uint64_t open_ns = 0;
  uint64_t reduce_ns = 0;  // includes copying into the user's tensor
  uint64_t wait_ns = 0;  // nothing could move
  uint64_t transfer_ns() const { return run_ns - seal_ns - open_ns - reduce_ns - wait_ns; }
};

// Segments under way at once. More segments hide latency better; fewer stay in the cache.
inline constexpr uint64_t kWindow = 4;
// A lane takes this many segments in a row. A tensor of at most this many segments uses one lane, on all
// ranks, even if they do not know each other's tensors.
inline constexpr uint64_t kStripe = kWindow;
// The most bytes of sealed records that may queue on one link to be forwarded.
inline constexpr uint64_t kForwardBudget = 8u << 20;

// How a call's slots are cut into segments, and how many segments are under way at once.
struct Cut {
  Cut(const Call& call, const Wires* wires);
  // How many segments of this lane the step has.
  uint64_t segments_of(int step) const;
  // Convert a segment's number in this lane to its number in the whole tensor, and back.
  uint64_t position(uint64_t segment) const;
  uint64_t segment_at(uint64_t position) const;
  bool in_this_lane(uint64_t position) const {
    return position / kStripe % call.lanes == call.lane;
  }
  // How many of the call's lanes have at least one segment.
  static size_t lanes_used(const Call& call);
  size_t slot_bytes(int slot) const;
  size_t segment_length(uint64_t position, int slot) const;
  size_t scratch_bytes() const { return window * program.scratch.size() * segment_bytes; }
  // The memory of the slots that this rank's steps write.
  std::vector<std::span<uint8_t>> results() const;

  const Call& call;
  const Program& program;
  const size_t segment_bytes;
  uint64_t segments;  // of the longest slot that a step uses
  uint64_t full_segments = 0;  // how many of them have every step
  uint64_t steps = 0;  // in all segments
  uint64_t window = 1;  // segments under way at once
};

// This rank's latest collectives, including the one under way.
using History = std::deque<View>;

View view_of(const Call& call);

class Collective {
 public:
  // Links that are made while the collective runs, and the function that puts them in their place in `links`.
  struct Latecomers {
    LateLinks& links;
    std::function<void(std::vector<LateLink>)> place;
  };

  // `device` is null if the slots are in host memory.
  Collective(const Call& call, Links& links, Keyring& keyring, BufferPool& pool, Device* device,
             Wires* wires, Stats& stats, Backoff& patience, const History& history,
             const std::atomic<bool>& interrupted, const Lease* lease,
             const Latecomers& latecomers);
  ~Collective();

  // Returns when this rank's part is done and everything it had to send has left.
  void run();

 private:
  struct Segment {
    uint64_t number = 0;  // in this lane
    uint64_t position = 0;  // in the whole tensor
    std::vector<int> waits;  // how many steps each step still waits for
    std::vector<bool> done;
    size_t left = 0;  // steps that are not done
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
  // True while the device still has work of this collective.
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
  // Whether the peer reads this lane in this collective. If not, nothing may be sent to it here: the pipe
  // would fill up.
  bool reads_here(int peer) const { return call_.lane == 0 || in_this_lane_.contains(peer); }
  [[noreturn]] void disagree(int peer, int other, const View& theirs, const View& mine) const;
  [[noreturn]] void throw_timeout();

  uint8_t* at(Segment& segment, int slot) const;
  size_t length(const Segment& segment, int slot) const;
  uint64_t total_of(int slot) const;
  size_t first_length(const Segment& segment, int slot) const {
    return std::min(length(segment, slot), device_ == nullptr ? SIZE_MAX : kGpuPayload);
  }
  // The number of a segment's first record. A device may seal a segment as a run of records with consecutive
  // numbers.
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
  const Lease* const lease_;  // null if no broker admitted this worker
  unsigned rounds_ = 0;
  const ReduceFn reduce_;

  const uint64_t records_per_segment_;
  uint64_t opened_ = 0;  // segments started
  uint64_t finished_ = 0;  // segments done; they finish in any order
  uint64_t oldest_ = 0;  // the first segment that is not done
  std::vector<Segment> window_;
  std::deque<Task> tasks_;
  std::vector<bool> blocked_;  // by rank: whether a task waits for this link
  std::vector<uint64_t> expected_;  // records still to come, by rank
  std::set<int> in_this_lane_;  // in a further lane: the ranks with which it exchanges records
  std::set<int> area_readers_;  // ranks that fetch records from our area
  RecordsOnDevice on_device_;
  std::optional<Exchanging> exchanging_;  // set if devices exchange records
  std::optional<Clock::time_point> status_sent_;  // when our status was last sent
  bool device_idle_ = false;  // the device has finished this collective's work
  BufferRef plain_;  // holds the plaintext of a record whose ciphertext is forwarded
};

}  // namespace sealring
