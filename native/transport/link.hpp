// The link to one peer: the pipe, the keys of the pair, the records that wait to leave, and the record that
// is arriving.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "keys/keys.hpp"
#include "record/commitment.hpp"
#include "record/failure.hpp"
#include "record/names.hpp"
#include "record/record.hpp"
#include "record/view.hpp"
#include "transport/buffers.hpp"
#include "transport/pipe.hpp"

namespace sealring {

// What every link of a group needs to check a record's header.
struct Keyring {
  int rank;
  Context context;
  std::unique_ptr<SealingKey> own_group;
  std::vector<std::unique_ptr<OpeningKey>> groups;  // by rank; empty for our own
  // The group's keys for what GPUs seal, and the memory that such records pass through; nullptr if no GPU
  // seals here.
  std::unique_ptr<SealingKey> own_group_gpu = nullptr;
  std::vector<std::unique_ptr<OpeningKey>> groups_gpu = {};
  BufferPool* gpu_pool = nullptr;
  uint32_t wire_slots = 0;  // slots in every peer's area; 0 while no wires are in use
  Names names = {};  // how failures name the group's ranks
  // Shared by all lanes of a group.
  std::shared_ptr<CommitmentTable> commitments = std::make_shared<CommitmentTable>();
  uint32_t lane = kCpuLane;  // the lane of all that CPUs seal under these keys
  // By rank: the key from which the group keys of further lanes are derived. Empty if there are no further
  // lanes.
  std::vector<std::optional<KeyBytes>> lanes_keys = {};
};

class Link {
 public:
  Link(int peer, std::unique_ptr<Pipe> pipe, const KeyBytes& send_key, const KeyBytes& receive_key,
       uint64_t rekey_bytes, Keyring& keyring, BufferPool& pool);

  // ---- out
  void enqueue(BufferRef record);
  // Whether another record may wait here for the pipe.
  bool has_room() const { return out_.size() < kMaxQueued; }
  bool has_room_for_device() const { return out_.size() + promised < kMaxPromised; }
  bool idle() const { return out_.empty(); }
  // The pipe accepts no more, and the records that waited to leave are lost. The reason may still be read
  // from the pipe.
  bool broken() const { return broken_; }
  bool delivered() const { return pipe_->delivered(); }
  // Writes as much as the pipe accepts. True if anything moved.
  bool flush();
  void seal(Header& header, const uint8_t* plain, uint8_t* out);
  // Seals a record for this peer in private memory; flush() then copies it into the pipe.
  void send(Header& header, const uint8_t* plain);
  // The keys for records that a GPU seals for this peer, and that the peer's GPU seals for this rank.
  SealingKey& gpu_send_key() { return *gpu_send_key_; }
  OpeningKey& gpu_receive_key() { return *gpu_receive_key_; }
  // The keys of a further lane of this pair.
  KeyBytes lane_send_key(uint32_t lane) const { return lane_key(lanes_send_key_.value(), lane); }
  KeyBytes lane_receive_key(uint32_t lane) const {
    return lane_key(lanes_receive_key_.value(), lane);
  }
  bool has_lanes_keys() const { return lanes_send_key_.has_value(); }
  void forget_lanes_keys();
  size_t promised = 0;  // records that a device is still sealing for this link

  // ---- in
  // Reads what is there. True if anything moved.
  bool fill();
  // A whole record is here, and its header is authentic and in sequence.
  bool ready() const { return in_ && have_ == in_->size && header_known_; }
  const Header& header() const { return header_; }
  // Opens the record into `plain`, or in place; throws on a bad tag.
  void open(uint8_t* plain);
  OpeningKey& arrived_key() { return key_of(header_); }
  uint8_t* arrived_payload() const { return in_->payload(); }
  // Hands the record over (to be forwarded or dropped) and makes room for the next one.
  BufferRef take();
  // Like take(), for a record that a device opens; opened_by_device() is called when it proved authentic.
  BufferRef take_for_device();
  void opened_by_device() { commitment_->received.confirm(); }

  // Whether the collective under way takes records from this peer. Only then is a published record's header
  // checked. Before, its sealer's earlier records may still be on their way over other links, and the
  // sequence could not be checked.
  bool expecting = false;

  // From now on only headers are read and no record is opened. Records may have been skipped, so gaps in the
  // counts are no error.
  bool only_listening = false;

  // ---- waiting
  bool wants_read() const { return !ready() && !ended_ && !postponed(); }
  bool arm();
  void disarm() { pipe_->disarm(); }
  short poll_events() const { return pipe_->poll_events(wants_read(), !idle()); }
  int socket() const { return pipe_->socket(); }
  void end_writing() { pipe_->end_writing(); }

  const int peer;
  bool said_bye = false;  // the peer closed its end normally, with a bye
  View seen;  // the View in the peer's last record
  uint64_t waits_in = 0;  // the last collective in which the peer said that it waits
  std::chrono::steady_clock::time_point said_waiting{};
  bool ended() const { return ended_; }
  uint64_t waited_ns = 0;
  uint64_t rekeys() const { return send_key_.rekeys(); }
  size_t memory_bytes() const { return pipe_->memory_bytes(); }

 private:
  static constexpr size_t kMaxQueued = 4;  // records that may wait for the pipe
  // records that may wait if a device seals them, which takes longer
  static constexpr size_t kMaxPromised = 12;

  bool postponed() const;
  void check_header();
  OpeningKey& key_of(const Header& header);

  std::unique_ptr<Pipe> pipe_;
  SealingKey send_key_;
  OpeningKey receive_key_;
  std::unique_ptr<SealingKey> gpu_send_key_;
  std::unique_ptr<OpeningKey> gpu_receive_key_;
  std::optional<KeyBytes> lanes_send_key_;
  std::optional<KeyBytes> lanes_receive_key_;
  Keyring& keyring_;
  BufferPool& pool_;
  const std::shared_ptr<LinkCommitment> commitment_;

  std::deque<BufferRef> out_;
  size_t out_offset_ = 0;
  bool broken_ = false;
  bool halved_ = false;  // the pipe ended in the middle of a record

  BufferRef in_;
  size_t have_ = 0;
  bool header_known_ = false;
  bool ended_ = false;
  Header header_;
  // The next record's header is read along with the end of this one, to save a system call.
  std::array<uint8_t, kSealedHeaderBytes> next_;
  size_t next_have_ = 0;
};

}  // namespace sealring
