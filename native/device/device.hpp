// A device that computes on tensors outside the CPU's memory: a GPU.
//
// The work of one queue runs in order; queues may overlap. A segment's steps, and those of later segments
// that use the same scratch memory, go into one queue; steps in other queues do not depend on them. So a step
// may be begun as soon as the steps before it were begun. Only two results must be waited for: that a record
// may leave the device, and that a record was authentic. These have a ticket.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "device/command_queue.hpp"
#include "device/exchange.hpp"
#include "keys/keys.hpp"
#include "reduce/reduce.hpp"

namespace sealring {

// A call that the device cannot perform throws; the group then ends, on all ranks.
class Device {
 public:
  using Ticket = uint64_t;  // 0, 1, 2, ...: tickets are settled in this order
  enum class State { pending, done, refused };

  // What a collective will need from the device.
  struct Need {
    uint64_t stream;  // the caller's stream; its earlier work runs first
    DType dtype;
    ReduceKind reduction;
    size_t segment_bytes;
    size_t scratch_bytes;
    uint32_t commands;  // the most commands that it can need
    uint32_t results;  // how many pieces of memory it writes
    std::vector<ExchangeRound> rounds = {};  // all its exchanges, in order
  };
  // The settings of one collective.
  struct Setting {
    uint64_t ready;  // the event after which the slots may be read and written
    DType dtype;
    ReduceKind reduction;
    uint32_t world;
    double factor;
    size_t segment_bytes;
    size_t scratch_bytes;
    Submitted submitted;  // what was launched ahead for it
  };

  // The place of records: host memory that the device can reach, or the memory of a device, this one or a
  // peer's.
  struct Area {
    uint8_t* at = nullptr;
    bool on_device = false;
    bool is_private = false;  // no other process can write there, so records are opened in place
  };

  // A run of records (often one record): the header that the first must have, and the place of the records.
  struct Record {
    int key;
    std::span<const uint8_t> header;  // 64 bytes
    std::span<const uint8_t> context;  // 32 bytes
    size_t length;  // of the whole run's payload
    Area area;
  };

  virtual ~Device() = default;

  // Called before the calling thread gives the device work.
  virtual void enter() = 0;
  // Whether an event has been reached, after which the memory that it guards may be used. 0 is always
  // reached.
  virtual bool reached(uint64_t event) = 0;

  // Host memory that the device can read and write.
  virtual void reserve_pinned_memory(size_t bytes, size_t pieces) = 0;
  virtual uint8_t* take_pinned_memory(size_t bytes) = 0;
  virtual void free_pinned_memory(uint8_t* memory) = 0;
  // The device's and host's memory that this object uses, without pinned memory that was taken from it and
  // without a collective's scratch.
  virtual size_t memory_bytes() const = 0;

  // share() makes memory on this device that devices of other processes can read, and the handle with which
  // they find it. reach() opens such a handle. reach_host() makes host memory that several processes share
  // reachable. All of it lives as long as the device.
  virtual Area share(size_t bytes, std::vector<uint8_t>& handle) = 0;
  virtual Area reach(std::span<const uint8_t> handle) = 0;
  virtual Area reach_host(uint8_t* memory, size_t bytes) = 0;
  // Memory of this device that no other process can reach.
  virtual Area own_area(size_t bytes) = 0;
  // Exchanges with other ranks' devices. All ranks need the same meeting id to meet. begin_connecting()
  // connects with the peers with which records will be exchanged; it is called between two collectives.
  // Meeting and connecting are begun here and are complete when exchanges_ready() returns true.
  virtual std::vector<uint8_t> new_meeting_id(int world) = 0;
  virtual void begin_meeting(std::span<const uint8_t> id, int rank, int world) = 0;
  virtual void begin_connecting(const std::vector<int>& peers) = 0;
  virtual bool exchanges_ready() = 0;
  virtual void drop_exchanges() noexcept = 0;
  // Makes room for runs of records with up to this much payload.
  virtual void make_room(size_t payload) = 0;

  // How many GPU keys an engine has: for each peer one to send, one to receive and the peer's group key, and
  // our own group key.
  static int keys_of_group(int world) { return 3 * world; }
  // Keys, by slot. A replaced key is overwritten when all work begun with it is done.
  virtual int add_key(const KeyBytes& key) = 0;
  virtual void replace_key(int slot, const KeyBytes& key) = 0;
  virtual void wipe() = 0;

  // The queue that streams wait through; null if they cannot wait.
  virtual CommandQueue* command_queue() { return nullptr; }
  // Launches a collective's kernels ahead; called once for each collective, in the order in which they will
  // be run.
  virtual Submitted submit(const Need& /*need*/) { return {}; }
  // Launches the remaining kernels of the last submitted collective. May block until the device has run some
  // of them.
  virtual void launch_rest() {}
  virtual void begin(const Setting& setting) = 0;
  // Returns when all work that was begun is done.
  virtual void end() = 0;
  // Like end(), but also after a failure.
  virtual void abandon() noexcept = 0;
  virtual uint8_t* scratch() const = 0;

  // Lets the channel's next exchange of the collective run; false if it cannot be begun yet.
  virtual bool exchange(const Exchange& next) = 0;
  // How many of the collective's exchanges on the channel are complete.
  virtual uint64_t exchanged(size_t channel) = 0;

  // Whether another record can be sealed or opened before a ticket is settled.
  virtual bool has_room() const = 0;
  virtual Ticket seal(uint64_t queue, const Record& record, const uint8_t* plain) = 0;
  // Checks the record; then, and only if it is authentic, writes or reduces it into `into`.
  virtual Ticket open(uint64_t queue, const Record& record, uint8_t* into, bool reduces) = 0;
  // The state of the oldest unsettled ticket. Any state but pending settles the ticket.
  virtual State settle(Ticket ticket) = 0;

  virtual void copy(uint64_t queue, uint8_t* into, const uint8_t* from, size_t bytes) = 0;
  virtual void reduce(uint64_t queue, uint8_t* into, const uint8_t* from, size_t bytes) = 0;
  virtual void average(uint64_t queue, uint8_t* into, size_t bytes) = 0;
  virtual void premultiply(uint64_t queue, uint8_t* into, size_t bytes) = 0;
};

}  // namespace sealring
