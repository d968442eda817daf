// What computes on tensors that are not in the CPU's memory: a GPU.
//
// The work of one queue runs in order; queues may overlap. A segment's steps,
// and those of later segments that use its scratch memory, go into one queue, and no others depend on
// each other. So a step may be begun as soon as those before it are. Only what leaves the device, and
// whether a record was authentic, must be waited for: that has a ticket.
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

// What it cannot do it says with an exception; the group then ends, on all ranks.
class Device {
 public:
  using Ticket = uint64_t;  // 0, 1, 2, ...: tickets are asked about in this order
  enum class State { pending, done, refused };

  // What a collective will need of the device.
  struct Need {
    uint64_t stream;  // the caller's: what it was given before comes first
    DType dtype;
    ReduceKind reduction;
    size_t segment_bytes;
    size_t scratch_bytes;
    uint32_t commands;  // at most
    uint32_t results;  // parts of memory that it writes
    std::vector<ExchangeRound> rounds = {};  // all exchanges that it will run, in order
  };
  // What holds for all of a collective.
  struct Setting {
    uint64_t ready;  // the event after which the slots may be read and written
    DType dtype;
    ReduceKind reduction;
    uint32_t world;
    double factor;
    size_t segment_bytes;
    size_t scratch_bytes;
    Submitted submitted;  // what the device was given ahead
  };

  // Where records lie, or are to lie: in host memory that the device reaches by itself, or in a
  // device's, this one's or a peer's.
  struct Area {
    uint8_t* at = nullptr;
    bool on_device = false;
    bool is_private = false;  // no other process can write there: records are opened in place
  };

  // A run of records, mostly of one: what the first one's header must be, and where they lie.
  struct Record {
    int key;
    std::span<const uint8_t> header;  // 64 bytes
    std::span<const uint8_t> context;  // 32 bytes
    size_t length;  // of the payload, all of it
    Area area;
  };

  virtual ~Device() = default;

  // Work for the device comes from the calling thread now.
  virtual void enter() = 0;
  // Whether an event has been reached: the memory that it guards may then be used. 0 is always reached.
  virtual bool reached(uint64_t event) = 0;

  // Host memory that the device reads and writes by itself.
  virtual void reserve_pinned_memory(size_t bytes, size_t pieces) = 0;
  virtual uint8_t* take_pinned_memory(size_t bytes) = 0;
  virtual void free_pinned_memory(uint8_t* memory) = 0;
  // What it has for itself, there and here, besides what was taken from it or is a collective's scratch.
  virtual size_t memory_bytes() const = 0;

  // Memory of this device that other processes' devices can read, and the handle by which they find
  // it; what such a handle leads to; host memory that several processes share. All lives as long as
  // the device does.
  virtual Area share(size_t bytes, std::vector<uint8_t>& handle) = 0;
  virtual Area reach(std::span<const uint8_t> handle) = 0;
  virtual Area reach_host(uint8_t* memory, size_t bytes) = 0;
  // Memory of this device for itself alone.
  virtual Area own_area(size_t bytes) = 0;
  // Exchanges with the devices of other ranks: what all ranks must know to meet, and the meeting; then
  // the connections with those with which this one will exchange records, between two collectives. Both are
  // begun here and complete when `exchanges_ready` returns true.
  virtual std::vector<uint8_t> new_meeting_id(int world) = 0;
  virtual void begin_meeting(std::span<const uint8_t> id, int rank, int world) = 0;
  virtual void begin_connecting(const std::vector<int>& peers) = 0;
  virtual bool exchanges_ready() = 0;
  virtual void drop_exchanges() noexcept = 0;
  // From now on runs of records may have so much payload.
  virtual void make_room(size_t payload) = 0;

  // As many as an engine has for its GPU: with each peer one to send, one to receive and its group
  // key, and our own group key.
  static int keys_of_group(int world) { return 3 * world; }
  // Keys, by slot. A key that is replaced is overwritten when all that was begun with it is done.
  virtual int add_key(const KeyBytes& key) = 0;
  virtual void replace_key(int slot, const KeyBytes& key) = 0;
  virtual void wipe() = 0;

  // What streams wait for; null where they cannot.
  virtual CommandQueue* command_queue() { return nullptr; }
  // Gives the device its part of a collective ahead, one at a time, in the order in which they will be run.
  virtual Submitted submit(const Need& /*need*/) { return {}; }
  // The rest of what the last one needs ahead. May block until the device has done some of it.
  virtual void launch_rest() {}
  virtual void begin(const Setting& setting) = 0;
  // Returns when all that was begun is done.
  virtual void end() = 0;
  // The same, whatever has gone wrong.
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
  // Of the oldest ticket that is not settled; anything but pending settles it.
  virtual State settle(Ticket ticket) = 0;

  virtual void copy(uint64_t queue, uint8_t* into, const uint8_t* from, size_t bytes) = 0;
  virtual void reduce(uint64_t queue, uint8_t* into, const uint8_t* from, size_t bytes) = 0;
  virtual void average(uint64_t queue, uint8_t* into, size_t bytes) = 0;
  virtual void premultiply(uint64_t queue, uint8_t* into, size_t bytes) = 0;
};

}  // namespace sealring
