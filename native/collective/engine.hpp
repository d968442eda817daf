// Runs a group's collectives. Holds their links and keys from the end of the handshake until the group is
// closed.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "collective/collective.hpp"
#include "collective/lanes.hpp"
#include "collective/run_lock.hpp"
#include "device/wires.hpp"
#include "operation/endpoint.hpp"

namespace sealring {

class Engine final : public Endpoint {
 public:
  Engine(int rank, int world, const Context& context, const KeyBytes& group_key,
         size_t record_bytes, uint64_t rekey_bytes,
         std::shared_ptr<FirstFailure> first_failure = std::make_shared<FirstFailure>(),
         Names names = {});
  ~Engine() override;

  void add_link(int peer, std::unique_ptr<Pipe> pipe, const KeyBytes& send_key,
                const KeyBytes& receive_key, const KeyBytes& peer_group_key) {
    Endpoint::add_link(peer, std::move(pipe), send_key, receive_key, &peer_group_key);
  }
  void attach(std::unique_ptr<Device> device) override;
  // Gives the device the keys of links that were made after it was attached. Called before a program on the
  // device uses those links.
  void put_late_keys();
  // Wires join this rank's device memory with the peers' devices. Each rank offers and opens its wires; they
  // are used when all ranks have done so.
  void offer_wires(uint32_t slots, size_t payload, const std::function<Device::Area(size_t)>& make);
  void open_wire(int peer, Device::Area area);
  // Some ranks cannot reach each other's areas: records between them go over the links.
  void mark_mixed();
  // offer_exchanges() makes the areas for exchanges, with two halves of `half_bytes` each. meet() makes all
  // ranks' devices meet. connect() connects this device with `peers`; afterwards records are exchanged with
  // them. meet() and connect() throw if a peer has gone, or after `patience_s`.
  void offer_exchanges(size_t half_bytes);
  void meet(std::span<const uint8_t> id, const std::vector<int>& peers, double patience_s);
  void connect(const std::vector<int>& peers, double patience_s);
  // Maps `bytes` of the file as host memory that the device can reach. The caller keeps the file.
  Device::Area map_wire(int file, size_t bytes);
  void use_wires();
  void drop_wires();
  bool wired() const { return keyring_.wire_slots != 0; }
  uint32_t wire_slots() const { return keyring_.wire_slots; }
  size_t largest_segment() const { return wires_ ? wires_->largest_segment() : 0; }
  bool exchanges() const { return wires_ && wired() && wires_->exchanges(); }

  // Adds a pipe of lane 1, 2, ... to a rank that has a link. All ranks number the lanes alike.
  void add_lane_link(size_t lane, int peer, std::unique_ptr<Pipe> pipe);
  // Called when all pipes of all lanes to these ranks are made. Forgets the keys from which the lanes' keys
  // were derived: somebody who reads this process's memory later could otherwise open what the lanes'
  // replaced keys have sealed.
  void complete_lanes(const std::vector<int>& peers);
  // Closes the further lanes to these ranks and forgets the same keys. These pairs have one lane from here
  // on.
  void drop_lanes(const std::vector<int>& peers);

  // Registers a collective. The thread that calls wait_on_host() runs it, in the order of submission. If
  // streams are to wait for it, its kernels are launched now, after the work of the caller's stream, and the
  // collective must then be run.
  std::shared_ptr<Completion> submit(Call call, const std::optional<CallerStream>& caller);
  // Launches the remaining kernels of the last collective that streams wait for. May block until some of
  // them have run.
  void launch_rest();
  // Marks the collective's end: the streams that wait for it wait for all work that the kernels' stream has
  // until now.
  void mark_end(const Completion& collective);
  // Called when a collective's run has failed and its error is recorded. Overwrites the results, then
  // releases the streams that wait for the collective.
  void release_streams(const Completion& collective);

  // Runs one collective to its end. On a Failure, tells the other ranks, closes the links and wipes the keys
  // before the Failure is thrown.
  void run(const Call& call);

  void close() override;
  bool release_device(std::chrono::duration<double> patience = std::chrono::hours(1)) override;
  void fail(const Failure& failure) override;
  // Makes a run under way in another thread end with FailureCode::closed.
  void interrupt() { interrupted_ = true; }
  // Whether the calling thread is running a collective. True in a signal handler that interrupts the run.
  bool runs_here() const { return running_.held_here(); }

  struct Account {
    Stats stats;
    std::vector<double> waited_s;  // by rank
    // By rank: how often the key to that rank was replaced; at our own rank: our group key.
    std::vector<uint64_t> rekeys;
    size_t memory_bytes;  // beyond the user's tensors
  };
  Account account() const;
  // The account's (sealed, opened) bytes. Called after every collective, so it does not copy the vectors.
  std::pair<uint64_t, uint64_t> sealed_and_opened() const;

 private:
  void wait_on_host(Completion& collective, const HostWait& how) override;
  Submitted submit_to_device(const Call& call, uint64_t stream);
  Cut cut_of(const Call& call) const { return Cut(call, call.wired ? wires_.get() : nullptr); }
  // The buffers for records on the links. If a GPU's records travel over the wires, a link carries their
  // headers alone.
  BufferPool& pool_of(const Call& call) {
    return call.on_device && !call.wired ? gpu_pool_ : pool_;
  }
  void require_possible(const Call& call);
  // Returns when the device's exchanges are ready. Called with `running_` held.
  void wait_for_exchanges(double patience_s);
  // The most key replacements that the call can need on the device. Adds the call's bytes to `device_bytes_`.
  uint64_t most_replaced_keys(const Cut& cut);
  void run_collective(const Call& call);
  void run_on(const Call& call, Links& links, Keyring& keyring, BufferPool& pool, Stats& stats,
              Backoff& backoff, LateLinks& late);
  void require_lanes(const Call& call) const;
  void run_lanes(const Call& call, size_t used);
  void run_lane(const Call& call);
  void wipe_all();
  void forget_lanes_keys(const std::vector<int>& peers);
  std::vector<Link*> all_links() const;
  void end_with(Failure& failure, const View& view);
  void say_where_last_seen(Failure& failure) const;
  void update_account();
  void add_account_of(const Lane& lane);
  // Puts links that were made late in their place. Called with `running_` held.
  void place_late_links(std::vector<LateLink> links);

  std::vector<std::unique_ptr<Lane>> lanes_;  // lanes 1 and up; lane 0 is the endpoint itself
  std::unique_ptr<Wires> wires_;
  RunLock running_;  // held while a collective runs
  std::atomic<bool> interrupted_{false};
  std::atomic<uint64_t> device_bytes_{0};  // an upper limit of what the device sealed and opened
  Stats stats_;
  Backoff backoff_;
  History history_;
  mutable std::mutex account_lock_;
  Account account_;
};

}  // namespace sealring
