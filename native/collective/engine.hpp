// A group's engine: its links and keys, from the handshake's end to the last goodbye.
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

#include "transport/buffers.hpp"
#include "collective/collective.hpp"
#include "device/device.hpp"
#include "record/first_failure.hpp"
#include "record/lease.hpp"
#include "transport/link.hpp"
#include "transport/mapped_file.hpp"
#include "keys/secret_memory.hpp"
#include "device/wires.hpp"

namespace sealring {

// In a forked child every call throws ForkedProcess, but for those that end the group: these do nothing,
// since the group and its connections are the parent's.
class Engine {
 public:
  Engine(int rank, int world, const Context& context, const KeyBytes& group_key,
         size_t record_bytes, uint64_t rekey_bytes,
         std::shared_ptr<FirstFailure> first_failure = std::make_shared<FirstFailure>(),
         Names names = {});
  ~Engine();

  void add_link(int peer, std::unique_ptr<Pipe> pipe, const KeyBytes& send_key,
                const KeyBytes& receive_key, const KeyBytes& peer_group_key);

  // Ends the group when the lease has ended. Before the first collective.
  void use_lease(std::shared_ptr<const Lease> lease) { lease_ = std::move(lease); }

  // What seals, opens and reduces the tensors that are not in the CPU's memory.
  void attach(std::unique_ptr<Device> device);
  Device* device() const { return device_.get(); }
  // Wires between its memory and the peers' devices: offered, opened and, when all ranks have, used.
  void offer_wires(uint32_t slots, size_t payload, const std::function<Device::Area(size_t)>& make);
  void open_wire(int peer, Device::Area area);
  void open_channel(int peer, int channel, bool sends);
  // A file of so many bytes as host memory that the device reaches; the file stays the caller's.
  Device::Area map_wire(int file, size_t bytes);
  void use_wires();
  void drop_wires();
  bool wired() const { return keyring_.wire_slots != 0; }
  bool channelled() const { return wires_ && wired() && wires_->channelled(); }
  int world() const { return static_cast<int>(links_.size()); }

  // Launches kernels for a collective, after the work of the caller's stream, in the order in which
  // collectives will be run. Streams may then wait for it; it must be run.
  Device::Prepared prepare(const Call& call, uint64_t stream);
  void launch_rest() {
    require_process();
    device_->launch_rest();
  }

  // Releases the streams that wait for a prepared collective whose run has failed.
  void poison_results(const Call& call);

  // Runs one collective to its end. On a Failure the other ranks are told, the links closed and
  // the keys wiped before it is thrown on.
  void run(const Call& call);

  // Ends the group in order: says goodbye to every peer and wipes the keys.
  void close();
  // Gives back what an ended group has of the device. This may take as long as the device is at work.
  void release_device();
  // Ends the group with a failure that was seen elsewhere, and tells the other ranks.
  void fail(const Failure& failure);
  // Makes a run under way in another thread end with FailureCode::closed.
  void interrupt() { interrupted_ = true; }
  const ProcessMark& process() const { return process_; }

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
  void require_process() const { process_.require("this process group"); }
  const Names& names() const { return keyring_.names; }
  // Over a link goes what a GPU sealed, or, where that goes another way, its header alone.
  BufferPool& pool_of(const Call& call) { return call.on_device && !call.wired ? gpu_pool_ : pool_; }
  void require_possible(const Call& call);
  // On the device, in this call; counts what it seals and opens.
  uint64_t most_replaced_keys(const Cut& cut);
  void run_collective(const Call& call, BufferPool& pool);
  void end_with(Failure& failure, const View& view);
  void say_where_last_seen(Failure& failure) const;
  void wipe();
  void update_account();

  const ProcessMark process_;
  const int rank_;
  const uint64_t rekey_bytes_;
  std::vector<MappedFile> mapped_;  // first: the device has it registered
  std::unique_ptr<Device> device_;  // then this: buffers lie in its memory
  BufferPool pool_;
  BufferPool gpu_pool_;
  std::unique_ptr<Wires> wires_;
  Keyring keyring_;
  Links links_;
  std::mutex running_;
  std::atomic<bool> interrupted_{false};
  const std::shared_ptr<FirstFailure> first_failure_;
  std::shared_ptr<const Lease> lease_;
  std::optional<Failure> failure_;
  bool closed_ = false;
  std::atomic<uint64_t> device_bytes_{0};   // that it sealed and opened, at most
  Stats stats_;
  Backoff backoff_;
  History history_;
  mutable std::mutex account_lock_;
  Account account_;
};

}  // namespace sealring
