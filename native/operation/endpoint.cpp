#include "operation/endpoint.hpp"

#include <algorithm>
#include <stdexcept>

#include "device/sealing_on_device.hpp"
#include "record/alert.hpp"

namespace sealring {

void Completion::wait_on_host(const HostWait& how) { owner_.wait_on_host(*this, how); }

void Completion::wait_on_stream(uint64_t stream) const {
  if (streams_wait()) owner_.wait_on_stream(stream, submitted_.number);
}

bool Completion::done() const { return streams_wait() ? owner_.done(submitted_.number) : ended(); }

std::optional<Failure> Completion::error() const { return ended() ? failure_ : std::nullopt; }

Endpoint::Endpoint(int rank, int world, const Context& context, size_t record_bytes,
                   size_t gpu_record_bytes, uint64_t rekey_bytes,
                   std::shared_ptr<FirstFailure> first_failure, Names names)
    : rank_(rank),
      rekey_bytes_(rekey_bytes),
      first_failure_(std::move(first_failure)),
      // An alert must fit into a buffer whatever the records' size.
      pool_(std::max(record_bytes, kMaxAlertText + 64)),
      gpu_pool_(gpu_record_bytes),
      keyring_{rank, context, nullptr, {}, nullptr, {}, &gpu_pool_, 0, std::move(names)},
      links_(static_cast<size_t>(world)) {}

void Endpoint::add_link(int peer, std::unique_ptr<Pipe> pipe, const KeyBytes& send_key,
                        const KeyBytes& receive_key, const KeyBytes* peer_group_key) {
  require_process();
  require_rank(peer);
  if (links_[peer]) throw std::invalid_argument("a second link to a rank");
  if (peer_group_key != nullptr) add_member(peer, *peer_group_key);
  place({peer, std::move(pipe), send_key, receive_key});
}

void Endpoint::add_member(int peer, const KeyBytes& group_key) {
  require_process();
  require_rank(peer);
  keyring_.groups[peer] = std::make_unique<OpeningKey>(group_key);
  keyring_.groups_gpu[peer] =
      std::make_unique<OpeningKey>(gpu_key(group_key), Suite::chacha20_poly1305);
  keyring_.lanes_keys[peer] = lanes_key(group_key);
}

void Endpoint::require_rank(int peer) const {
  if (peer < 0 || peer >= world() || peer == rank_) {
    throw std::invalid_argument("a link to a rank that cannot have one");
  }
}

void Endpoint::place(LateLink link) {
  if (links_[link.peer]) return;  // if both ends made a link at once, the second one is closed here
  links_[link.peer] = std::make_unique<Link>(link.peer, std::move(link.pipe), link.send_key,
                                             link.receive_key, rekey_bytes_, keyring_, pool_);
}

std::optional<Dismissal> Endpoint::add_late_link(LateLink link) {
  require_process();
  require_rank(link.peer);
  std::optional<LastWord> ended = late_.add(link);
  if (!ended) return std::nullopt;
  return Dismissal(rank_, keyring_.context, rekey_bytes_, std::move(link), std::move(*ended));
}

void Endpoint::attach(std::unique_ptr<Device> device) {
  require_process();
  const Lock lock(lock_);
  if (device_) throw std::invalid_argument("there is a device attached already");
  // Puts all present keys on the device now: later, putting a key would wait for the GPU's work, and streams
  // wait for that.
  std::vector<SealingKey*> sealing;
  std::vector<OpeningKey*> opening;
  if (keyring_.own_group_gpu) sealing.push_back(keyring_.own_group_gpu.get());
  for (const auto& link : links_) {
    if (!link) continue;
    sealing.push_back(&link->gpu_send_key());
    opening.push_back(&link->gpu_receive_key());
  }
  for (const auto& key : keyring_.groups_gpu) {
    if (key) opening.push_back(key.get());
  }
  put_keys(*device, sealing, opening);
  device_ = std::move(device);
  gpu_pool_.take_memory_of(device_.get());
  attached();
}

void Endpoint::wait_on_stream(uint64_t stream, uint32_t number) {
  require_process();
  Lock lock(lock_);
  // Without a device all waiting streams were released.
  if (CommandQueue* const queue = command_queue()) {
    call_without(lock, [&] { queue->wait_on_stream(stream, number); });
  }
}

bool Endpoint::done(uint32_t number) const {
  require_process();
  const Lock lock(lock_);
  const CommandQueue* const queue = command_queue();
  return queue == nullptr || queue->done(number);
}

void Endpoint::require_alive() const {
  if (failure_) throw *failure_;
  if (closed_) throw Failure(FailureCode::closed, -1, "the group is closed");
}

void Endpoint::require_device() const {
  if (!device_) throw std::invalid_argument("there is no device attached");
}

void Endpoint::wipe() {
  for (auto& link : links_) link.reset();
  for (auto& key : keyring_.groups) key.reset();
  for (auto& key : keyring_.groups_gpu) key.reset();
  for (auto& key : keyring_.lanes_keys) key.reset();
  keyring_.own_group.reset();
  keyring_.own_group_gpu.reset();
  if (device_) device_->wipe();
}

size_t Endpoint::memory_bytes() const {
  size_t bytes = pool_.bytes() + gpu_pool_.bytes() + (device_ ? device_->memory_bytes() : 0);
  for (const auto& link : links_) {
    if (link) bytes += link->memory_bytes();
  }
  return bytes;
}

}  // namespace sealring
