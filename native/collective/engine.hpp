// A group's collectives: their links and keys, from the handshake's end to the last goodbye.
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
  // Gives the device the keys of links that came after it. Before a program runs on it that uses them.
  void put_late_keys();
  // Wires between its memory and the peers' devices: offered, opened and, when all ranks have, used.
  void offer_wires(uint32_t slots, size_t payload, const std::function<Device::Area(size_t)>& make);
  void open_wire(int peer, Device::Area area);
  // Some ranks cannot reach each other's areas: what goes between them takes the links.
  void mark_mixed();
  // Areas for what is exchanged, two halves of so many bytes each; then the meeting of all ranks' devices.
  // With `peers` records will be exchanged, once the device is connected with them. Both throw when a peer
  // has gone, or when it takes longer than `patience_s`.
  void offer_exchanges(size_t half_bytes);
  void meet(std::span<const uint8_t> id, const std::vector<int>& peers, double patience_s);
  void connect(const std::vector<int>& peers, double patience_s);
  // A file of so many bytes as host memory that the device reaches; the file stays the caller's.
  Device::Area map_wire(int file, size_t bytes);
  void use_wires();
  void drop_wires();
  bool wired() const { return keyring_.wire_slots != 0; }
  uint32_t wire_slots() const { return keyring_.wire_slots; }
  size_t largest_segment() const { return wires_ ? wires_->largest_segment() : 0; }
  bool exchanges() const { return wires_ && wired() && wires_->exchanges(); }

  // One more pipe to a rank that has a link: of lane 1, 2 and so on, each on all ranks alike.
  void add_lane_link(size_t lane, int peer, std::unique_ptr<Pipe> pipe);
  // All pipes of all lanes to these ranks are made: forgets the keys from which theirs came. With those, one
  // who reads this process's memory later could open what the lanes' replaced keys have sealed.
  void complete_lanes(const std::vector<int>& peers);
  // The same, and closes them: these pairs have one lane from here on.
  void drop_lanes(const std::vector<int>& peers);

  // A collective that will be run: by the thread that calls wait_on_host, in the order submitted. Where
  // streams are to wait, kernels are launched for it, after the work of the caller's stream; it must then
  // be run.
  std::shared_ptr<Completion> submit(Call call, const std::optional<CallerStream>& caller);
  // Launches the remaining kernels of the last collective that streams wait for. May block until some of
  // them have run.
  void launch_rest();
  // Streams wait for what the kernels' stream was given until now.
  void mark_end(const Completion& collective);
  // Called when a collective's run has failed and its error is recorded: releases the streams that wait for
  // it. Its results are first overwritten.
  void release_streams(const Completion& collective);

  // Runs one collective to its end. On a Failure the other ranks are told, the links closed and
  // the keys wiped before it is thrown on.
  void run(const Call& call);

  void close() override;
  bool release_device(std::chrono::duration<double> patience = std::chrono::hours(1)) override;
  void fail(const Failure& failure) override;
  // Makes a run under way in another thread end with FailureCode::closed.
  void interrupt() { interrupted_ = true; }
  // Whether this thread runs a collective: true in the handler of a signal that came meanwhile.
  bool runs_here() const { return running_.held_here(); }

  struct Account {
    Stats stats;
    std::vector<double> waited_s;  // by rank
    std::vector<uint64_t> rekeys;  // of the key to each rank; our own place: of our group key
    size_t memory_bytes;           // beyond the user's tensors
  };
  Account account() const;
  // (sealed, opened) bytes of it. Asked for after every collective, so without the vectors.
  std::pair<uint64_t, uint64_t> sealed_and_opened() const;

 private:
  void wait_on_host(Completion& collective, const HostWait& how) override;
  Submitted submit_to_device(const Call& call, uint64_t stream);
  Cut cut_of(const Call& call) const { return Cut(call, call.wired ? wires_.get() : nullptr); }
  // Over a link goes what a GPU sealed, or, where that goes another way, its header alone.
  BufferPool& pool_of(const Call& call) {
    return call.on_device && !call.wired ? gpu_pool_ : pool_;
  }
  void require_possible(const Call& call);
  // Returns when the device's exchanges are ready. By the thread that has `running_`.
  void wait_for_exchanges(double patience_s);
  // On the device, in this call; counts what it seals and opens.
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
  // Gives the links that came late their place. By the thread that has `running_`.
  void place_late_links(std::vector<LateLink> links);

  std::vector<std::unique_ptr<Lane>> lanes_;  // 1 and on; the first is the endpoint itself
  std::unique_ptr<Wires> wires_;
  RunLock running_;  // held while a collective runs
  std::atomic<bool> interrupted_{false};
  std::atomic<uint64_t> device_bytes_{0};   // that it sealed and opened, at most
  Stats stats_;
  Backoff backoff_;
  History history_;
  mutable std::mutex account_lock_;
  Account account_;
};

}  // namespace sealring
