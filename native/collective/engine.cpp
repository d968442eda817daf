#include "collective/engine.hpp"

#include <algorithm>
#include <set>
#include <string>

#include "record/alert.hpp"
#include "transport/farewell.hpp"
#include "transport/inherited_sockets.hpp"
#include "device/sealing_on_device.hpp"

namespace sealring {
namespace {

// Far more than ranks can be apart: links hold a few records.
constexpr size_t kHistory = 256;

// Of what is launched ahead for one collective. One that would need more is done while its caller waits.
constexpr uint64_t kMostCommands = 1u << 16;
// More buffers than can be on their way at once: what a device has in hand, and what a link holds.
constexpr size_t kInHand = 40, kLink = 16, kForwardingLink = 48;

}  // namespace

Engine::Engine(int rank, int world, const Context& context, const KeyBytes& group_key,
               size_t record_bytes, uint64_t rekey_bytes,
               std::shared_ptr<FirstFailure> first_failure, Names names)
    : rank_(rank),
      rekey_bytes_(rekey_bytes),
      // An alert must fit into a buffer whatever the records' size.
      pool_(std::max(record_bytes, kMaxAlertText + 64)),
      gpu_pool_(kGpuPayload),
      keyring_{rank,
               context,
               std::make_unique<SealingKey>(group_key, rekey_bytes),
               {},
               std::make_unique<SealingKey>(gpu_key(group_key), rekey_bytes, Suite::chacha20_poly1305),
               {},
               &gpu_pool_,
               0,
               std::move(names)},
      links_(static_cast<size_t>(world)),
      first_failure_(std::move(first_failure)) {
  keyring_.groups.resize(static_cast<size_t>(world));
  keyring_.groups_gpu.resize(static_cast<size_t>(world));
  update_account();
}

Engine::~Engine() { close(); }

void Engine::add_link(int peer, std::unique_ptr<Pipe> pipe, const KeyBytes& send_key,
                      const KeyBytes& receive_key, const KeyBytes& peer_group_key) {
  require_process();
  if (peer < 0 || static_cast<size_t>(peer) >= links_.size() || peer == rank_ || links_[peer]) {
    throw std::invalid_argument("a link to a rank that cannot have one");
  }
  keyring_.groups[peer] = std::make_unique<OpeningKey>(peer_group_key);
  keyring_.groups_gpu[peer] =
      std::make_unique<OpeningKey>(gpu_key(peer_group_key), Suite::chacha20_poly1305);
  links_[peer] = std::make_unique<Link>(peer, std::move(pipe), send_key, receive_key, rekey_bytes_,
                                        keyring_, pool_);
  close_in_children(links_[peer]->socket());
}

void Engine::attach(std::unique_ptr<Device> device) {
  require_process();
  const std::lock_guard<std::mutex> lock(running_);
  if (device_) throw std::invalid_argument("the engine has a device already");
  // All keys now: later a GPU is at work, and streams wait for it.
  std::vector<SealingKey*> sealing{keyring_.own_group_gpu.get()};
  std::vector<OpeningKey*> opening;
  for (size_t peer = 0; peer < links_.size(); ++peer) {
    if (!links_[peer]) continue;
    sealing.push_back(&links_[peer]->gpu_send_key());
    opening.push_back(&links_[peer]->gpu_receive_key());
    opening.push_back(keyring_.groups_gpu[peer].get());
  }
  put_keys(*device, sealing, opening);
  device_ = std::move(device);
  gpu_pool_.take_memory_of(device_.get());
}

void Engine::offer_wires(uint32_t slots, size_t payload,
                         const std::function<Device::Area(size_t)>& make) {
  require_process();
  if (!device_) throw std::invalid_argument("there is no device attached");
  if (slots == 0 || payload < kGpuPayload || payload % kGpuPayload != 0) {
    throw std::invalid_argument("a slot must hold whole records");
  }
  auto wires = std::make_unique<Wires>(world(), slots, payload);
  wires->own = make(Wires::area_bytes(slots, payload));
  const std::lock_guard<std::mutex> lock(running_);
  device_->make_room(payload);  // now, while this rank can still say that it has none
  wires_ = std::move(wires);
}

void Engine::open_wire(int peer, Device::Area area) {
  require_process();
  const std::lock_guard<std::mutex> lock(running_);
  if (!wires_) throw std::invalid_argument("no wires were offered");
  wires_->area_of(peer) = area;
}

void Engine::open_channel(int peer, int channel, bool sends) {
  require_process();
  const std::lock_guard<std::mutex> lock(running_);
  if (!wires_) throw std::invalid_argument("no wires were offered");
  if (sends) {
    wires_->channel_to(peer) = channel;
  } else {
    wires_->area_of(peer) = {nullptr, true, channel};
  }
}

Device::Area Engine::map_wire(int file, size_t bytes) {
  require_process();
  const std::lock_guard<std::mutex> lock(running_);
  if (!device_) throw std::invalid_argument("there is no device attached");
  mapped_.emplace_back(file, bytes);
  return device_->reach_host(mapped_.back().data(), bytes);
}

void Engine::use_wires() {
  require_process();
  const std::lock_guard<std::mutex> lock(running_);
  if (!wires_ || failure_ || closed_) return;
  keyring_.wire_slots = wires_->slots();
}

void Engine::drop_wires() {
  require_process();
  const std::lock_guard<std::mutex> lock(running_);
  if (keyring_.wire_slots != 0) throw std::invalid_argument("the wires are in use");
  wires_.reset();
}

// Not under the lock of a run, which may wait for the peers of another one.
Device::Prepared Engine::prepare(const Call& call, uint64_t stream) {
  require_process();
  if (!device_) throw std::invalid_argument("there is no device attached");
  const Cut cut(call, call.wired ? wires_.get() : nullptr);
  const uint64_t commands = std::max<uint64_t>(1, cut.steps + most_replaced_keys(cut));
  if (commands > kMostCommands) return {};
  if (!call.wired) {
    const auto forwards = [](const Step& step) { return step.action == Action::forward; };
    const std::vector<Step>& steps = call.program->steps;
    const size_t on_a_link =
        std::any_of(steps.begin(), steps.end(), forwards) ? kForwardingLink : kLink;
    std::set<int> peers;
    for (const Step& step : steps) peers.insert(step.peers.begin(), step.peers.end());
    device_->reserve_pinned_memory(gpu_pool_.slab_bytes(), kInHand + on_a_link * peers.size());
  }
  return device_->prepare({stream, call.dtype, call.reduction, call.segment_bytes,
                           cut.scratch_bytes(), static_cast<uint32_t>(commands),
                           static_cast<uint32_t>(cut.results().size())});
}

// Each key once for every `rekey_bytes_` that it seals, but for the last piece before that, and once for
// what it sealed before this call. Not before so much has ever been sealed.
uint64_t Engine::most_replaced_keys(const Cut& cut) {
  uint64_t bytes = cut.steps * records_in_run(cut.segment_bytes) * kTagBytes;
  std::set<std::pair<int, int>> keys;  // whose, and for whom
  for (const Step& step : cut.program.steps) {
    bytes += cut.slot_bytes(step.slot);
    if (step.action == Action::send) keys.emplace(rank_, step.peers[0]);
    if (step.action == Action::publish) keys.emplace(rank_, -1);
    if (!receives(step.action)) continue;
    const bool alone = step.origin < 0;
    keys.emplace(alone ? step.peers[0] : step.origin, alone ? rank_ : -1);
  }
  const uint64_t piece = sealed_run_bytes(cut.segment_bytes);
  if ((device_bytes_ += bytes) + piece < rekey_bytes_) return 0;
  if (rekey_bytes_ <= 2 * piece) return cut.steps;
  return std::min<uint64_t>(cut.steps, keys.size() * (1 + bytes / (rekey_bytes_ - piece)));
}

void Engine::poison_results(const Call& call) {
  require_process();
  const std::lock_guard<std::mutex> lock(running_);
  if (call.prepared.commands == 0 || !device_) return;
  // The keys go with it, so the group must have ended.
  if (!failure_ && !closed_) {
    Failure ends = first_failure_->settle(
        Failure(FailureCode::closed, -1, "a collective on " + names().rank(rank_) + " was not run"));
    end_with(ends, {});
  }
  device_->poison_results(call.prepared, Cut(call, call.wired ? wires_.get() : nullptr).results());
}

void Engine::run(const Call& call) {
  require_process();
  const std::lock_guard<std::mutex> lock(running_);
  require_possible(call);
  if (call.on_device && call.prepared.commands == 0) {
    most_replaced_keys(Cut(call, call.wired ? wires_.get() : nullptr));
  }
  BufferPool& pool = pool_of(call);
  history_.push_back(view_of(call));
  if (history_.size() > kHistory) history_.pop_front();
  try {
    run_collective(call, pool);
  } catch (Failure& failure) {
    // What another rank reports of a message happened in none of our collectives.
    if (failure.collective == 0 && failure.reported_by < 0) failure.collective = call.number;
    say_where_last_seen(failure);
    Failure ends = first_failure_->settle(failure);
    end_with(ends, view_of(call));
    throw ends;
  }
  update_account();
}

void Engine::require_possible(const Call& call) {
  if (failure_) throw *failure_;
  if (closed_) throw Failure(FailureCode::closed, -1, "the group is closed");
  const Program& program = *call.program;
  if (program.rank != rank_ || static_cast<size_t>(program.world) != links_.size()) {
    throw std::invalid_argument("the program is for another rank or world");
  }
  if (call.slots.size() != static_cast<size_t>(program.slots)) {
    throw std::invalid_argument("the program needs another number of slots");
  }
  if (call.on_device && !device_) throw std::invalid_argument("there is no device attached");
  if (call.wired && (!call.on_device || !wired())) {
    throw std::invalid_argument("there are no wires in use");
  }
  const size_t largest = call.wired ? wires_->payload() : pool_of(call).payload_bytes();
  if (call.segment_bytes == 0 || call.segment_bytes > largest || call.segment_bytes % 16 != 0) {
    throw std::invalid_argument("a segment must be a multiple of 16 bytes and fit into a record");
  }
  for (const Step& step : program.steps) {
    for (int peer : step.peers) {
      if (!links_[peer]) throw std::invalid_argument("the program needs a link that is not there");
    }
    const bool reduces = step.action == Action::reduce || step.action == Action::receive_reduce;
    if (reduces && reduce_function(call.dtype, call.reduction) == nullptr) {
      throw std::invalid_argument("this dtype has no such reduction");
    }
  }
}

void Engine::run_collective(const Call& call, BufferPool& pool) {
  Device* const device = call.on_device ? device_.get() : nullptr;
  try {
    Wires* const wires = call.wired ? wires_.get() : nullptr;
    Collective(call, links_, keyring_, pool, device, wires, stats_, backoff_, history_,
               interrupted_, lease_.get())
        .run();
  } catch (const Failure&) {
    throw;
  } catch (const ForkedProcess&) {
    throw;  // the parent's collective goes on
  } catch (const std::exception& broken) {
    if (device == nullptr) throw;
    // The other ranks wait for this one: they must be told.
    throw Failure(FailureCode::closed, -1,
                  "the GPU of " + names().rank(rank_) + " failed: " + broken.what());
  }
}

void Engine::fail(const Failure& failure) {
  if (!process_.here()) return;
  // First: a run under way ends with it, not with the interruption that it sees.
  Failure ends = first_failure_->settle(failure);
  interrupted_ = true;
  const std::lock_guard<std::mutex> lock(running_);
  if (closed_ || failure_) return;
  end_with(ends, {});
}

// Of a rank that is gone or silent: what it was doing when it was last heard of.
void Engine::say_where_last_seen(Failure& failure) const {
  const bool absent =
      failure.code == FailureCode::peer_lost || failure.code == FailureCode::peer_silent;
  if (!absent || failure.reported_by >= 0 || failure.peer < 0 || !links_[failure.peer]) return;
  const View& seen = links_[failure.peer]->seen;
  Failure said(failure.code, failure.peer,
               failure.what() + std::string("; ") + names().rank(failure.peer) + " was last seen " +
                   (seen.number == 0 ? "before its first collective"
                                     : "in " + names().view(seen) + names().remark({seen.operation})));
  said.collective = failure.collective;
  failure = said;
}

void Engine::end_with(Failure& failure, const View& view) {
  send_last_records(links_, Kind::alert, encode_alert(failure, rank_), view);
  if (failure.code == FailureCode::out_of_step) {
    if (view.number != 0) failure.views[rank_] = names().rank(rank_) + ": " + names().view(view);
    collect_views(links_, names(), failure);
  }
  failure_ = failure;
  update_account();  // what was waited for goes with the links
  wipe();
  update_account();
}

void Engine::close() {
  if (!process_.here()) return;
  interrupted_ = true;
  const std::lock_guard<std::mutex> lock(running_);
  if (closed_ || failure_) return;
  closed_ = true;
  send_last_records(links_, Kind::bye, {}, {});
  wipe();
}

void Engine::release_device() {
  if (!process_.here()) return;
  const std::lock_guard<std::mutex> lock(running_);
  if (!device_ || (!closed_ && !failure_) || !device_->at_rest()) return;
  wires_.reset();
  gpu_pool_.clear();
  device_.reset();
  mapped_.clear();
}

// The keys' destructors overwrite them.
void Engine::wipe() {
  for (auto& link : links_) {
    if (link) forget_in_children(link->socket());
    link.reset();
  }
  for (auto& key : keyring_.groups) key.reset();
  for (auto& key : keyring_.groups_gpu) key.reset();
  keyring_.own_group.reset();
  keyring_.own_group_gpu.reset();
  if (device_) device_->wipe();
}

void Engine::update_account() {
  const std::lock_guard<std::mutex> lock(account_lock_);
  account_.stats = stats_;
  account_.waited_s.resize(links_.size(), 0.0);
  account_.rekeys.resize(links_.size(), 0);
  if (keyring_.own_group) account_.rekeys[rank_] = keyring_.own_group->rekeys();
  account_.memory_bytes = pool_.bytes() + gpu_pool_.bytes() + stats_.scratch_bytes;
  if (device_) account_.memory_bytes += device_->memory_bytes();
  if (wires_) account_.memory_bytes += Wires::area_bytes(wires_->slots(), wires_->payload());
  for (size_t peer = 0; peer < links_.size(); ++peer) {
    if (!links_[peer]) continue;
    account_.waited_s[peer] = static_cast<double>(links_[peer]->waited_ns) * 1e-9;
    account_.rekeys[peer] = links_[peer]->rekeys();
    account_.memory_bytes += links_[peer]->memory_bytes();
  }
}

Engine::Account Engine::account() const {
  require_process();
  const std::lock_guard<std::mutex> lock(account_lock_);
  return account_;
}

std::pair<uint64_t, uint64_t> Engine::sealed_and_opened() const {
  require_process();
  const std::lock_guard<std::mutex> lock(account_lock_);
  return {account_.stats.sealed_bytes, account_.stats.opened_bytes};
}

}  // namespace sealring
