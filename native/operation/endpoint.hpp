// One rank's end of a group's links: the common part of collectives (collective/engine.hpp) and messages
// (mailbox/mailbox.hpp). Each of these has its own links, keys and device, so that neither waits for the
// other.
//
// In a forked child every call throws ForkedProcess, except the calls that end the group. These do nothing
// there, because the group and its connections belong to the parent.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "device/device.hpp"
#include "keys/secret_memory.hpp"
#include "operation/completion.hpp"
#include "record/first_failure.hpp"
#include "record/lease.hpp"
#include "transport/buffers.hpp"
#include "transport/farewell.hpp"
#include "transport/late_links.hpp"
#include "transport/link.hpp"
#include "transport/mapped_file.hpp"

namespace sealring {

class Endpoint {
 public:
  Endpoint(int rank, int world, const Context& context, size_t record_bytes,
           size_t gpu_record_bytes, uint64_t rekey_bytes,
           std::shared_ptr<FirstFailure> first_failure, Names names);
  virtual ~Endpoint() = default;
  Endpoint(const Endpoint&) = delete;
  Endpoint& operator=(const Endpoint&) = delete;

  // The peer's group key is needed to open the records that it publishes.
  void add_link(int peer, std::unique_ptr<Pipe> pipe, const KeyBytes& send_key,
                const KeyBytes& receive_key, const KeyBytes* peer_group_key = nullptr);
  // Adds the key that opens what this member seals for all, whether or not a link leads to the member. A
  // member whose key is known may be linked late.
  void add_member(int peer, const KeyBytes& group_key);
  // Never waits; any thread may call it, also while an operation runs. If the group has ended, returns what
  // the link's peer must still be told.
  std::optional<Dismissal> add_late_link(LateLink link);
  // Makes the group end when the lease ends. Called before the first operation.
  void use_lease(std::shared_ptr<const Lease> lease) { lease_ = std::move(lease); }
  // Attaches the device that seals, opens and reduces tensors outside the CPU's memory.
  virtual void attach(std::unique_ptr<Device> device);
  Device* device() const { return device_.get(); }
  int world() const { return static_cast<int>(links_.size()); }
  const ProcessMark& process() const { return process_; }
  // The commitments of all links, past and present. Any thread may call it, also when the group has ended.
  std::vector<std::shared_ptr<const LinkCommitment>> commitments() const {
    return keyring_.commitments->all();
  }

  // Ends the group normally: sends a bye to every peer and wipes the keys.
  virtual void close() = 0;
  // Ends the group with a failure that was seen elsewhere, and tells the other ranks.
  virtual void fail(const Failure& failure) = 0;
  // Releases the device of an ended group. Returns false if that is not possible yet. May take as long as the
  // device is at work.
  virtual bool release_device(std::chrono::duration<double> patience = std::chrono::hours(1)) = 0;

 protected:
  friend class Completion;
  using Lock = std::unique_lock<std::mutex>;

  // Called by `attach`, under the lock.
  virtual void attached() {}
  virtual void wait_on_host(Completion& completion, const HostWait& how) = 0;
  void wait_on_stream(uint64_t stream, uint32_t number);
  bool done(uint32_t number) const;

  // Puts a link in its place; the caller holds the lock that protects the links.
  void place(LateLink link);
  void require_rank(int peer) const;
  void require_process() const { process_.require("this process group"); }
  void require_alive() const;
  void require_device() const;
  const Names& names() const { return keyring_.names; }
  CommandQueue* command_queue() const { return device_ ? device_->command_queue() : nullptr; }
  // Makes a call to CUDA without the lock. CUDA may block the caller until the GPU has made progress, and
  // the threads that run operations must not wait for that. The device stays until the call returns.
  template <typename Call>
  void call_without(Lock& lock, Call call);
  // Runs `work`. If the device fails in it, throws a Failure, so that the peers, which wait for this rank,
  // are told.
  template <typename Work>
  auto with_device(bool uses_device, Work work);
  // Drops all links and keys; the keys' destructors overwrite them.
  void wipe();
  size_t memory_bytes() const;

  const ProcessMark process_;
  const int rank_;
  const uint64_t rekey_bytes_;
  mutable std::mutex lock_;
  std::condition_variable changed_;
  size_t calling_ = 0;  // threads that call CUDA without the lock
  const std::shared_ptr<FirstFailure> first_failure_;
  std::shared_ptr<const Lease> lease_;
  std::optional<Failure> failure_;
  bool closed_ = false;
  std::vector<MappedFile> mapped_;  // declared before the device, which has it registered
  std::unique_ptr<Device> device_;  // declared before the buffer pools, whose memory it may hold
  BufferPool pool_;
  BufferPool gpu_pool_;
  Keyring keyring_;
  Links links_;
  LateLinks late_;  // links that are not in their place yet
};

template <typename Call>
void Endpoint::call_without(Lock& lock, Call call) {
  ++calling_;
  const auto called = [this, &lock] {
    lock.lock();
    --calling_;
    changed_.notify_all();
  };
  lock.unlock();
  try {
    call();
  } catch (...) {
    called();
    throw;
  }
  called();
}

template <typename Work>
auto Endpoint::with_device(bool uses_device, Work work) {
  if (!uses_device) return work();
  try {
    return work();
  } catch (const Failure&) {
    throw;
  } catch (const ForkedProcess&) {
    throw;  // the parent's operation goes on
  } catch (const std::exception& broken) {
    throw Failure(FailureCode::closed, -1,
                  "the GPU of " + names().rank(rank_) + " failed: " + broken.what());
  }
}

}  // namespace sealring
