#include "engine.hpp"

#include <poll.h>

#include <algorithm>
#include <chrono>
#include <cstring>

#include "alert.hpp"

namespace sealring {
namespace {

// How long a rank that leaves tries to get its last words out.
constexpr std::chrono::milliseconds kLastWords{2000};

}  // namespace

Engine::Engine(int rank, int world, const Context& context, const KeyBytes& group_key,
               size_t record_bytes, uint64_t rekey_bytes)
    : rank_(rank),
      rekey_bytes_(rekey_bytes),
      keyring_{rank, context, std::make_unique<SealingKey>(group_key, rekey_bytes), {}},
      // An alert must fit into a buffer whatever the records' size.
      pool_(std::max(record_bytes, kMaxAlertText + 64)),
      links_(static_cast<size_t>(world)) {
  keyring_.groups.resize(static_cast<size_t>(world));
  update_account();
}

Engine::~Engine() { close(); }

void Engine::add_link(int peer, std::unique_ptr<Pipe> pipe, const KeyBytes& send_key,
                      const KeyBytes& receive_key, const KeyBytes& peer_group_key) {
  if (peer < 0 || static_cast<size_t>(peer) >= links_.size() || peer == rank_ || links_[peer]) {
    throw std::invalid_argument("a link to a rank that cannot have one");
  }
  keyring_.groups[peer] = std::make_unique<OpeningKey>(peer_group_key);
  links_[peer] = std::make_unique<Link>(peer, std::move(pipe), send_key, receive_key, rekey_bytes_,
                                        keyring_, pool_);
}

void Engine::run(const Call& call) {
  const std::lock_guard<std::mutex> lock(running_);
  if (failure_) throw *failure_;
  if (closed_) throw Failure(FailureCode::closed, -1, "the group is closed");
  const Program& program = *call.program;
  if (program.rank != rank_ || static_cast<size_t>(program.world) != links_.size()) {
    throw std::invalid_argument("the program is for another rank or world");
  }
  if (call.slots.size() != static_cast<size_t>(program.slots)) {
    throw std::invalid_argument("the program needs another number of slots");
  }
  if (call.segment_bytes == 0 || call.segment_bytes > pool_.payload_bytes() ||
      call.segment_bytes % 16 != 0) {
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
  try {
    Collective(call, links_, keyring_, pool_, stats_, interrupted_).run();
  } catch (Failure& failure) {
    if (failure.collective == 0) failure.collective = call.number;
    failure_ = failure;
    tell_everyone(Kind::alert, encode_alert(failure, rank_));
    update_account();  // what was waited for goes with the links
    wipe();
    update_account();
    throw;
  }
  update_account();
}

void Engine::close() {
  interrupted_ = true;
  const std::lock_guard<std::mutex> lock(running_);
  if (closed_ || failure_) return;
  closed_ = true;
  tell_everyone(Kind::bye, {});
  wipe();
}

void Engine::tell_everyone(Kind kind, std::span<const uint8_t> payload) {
  for (const auto& link : links_) {
    if (!link) continue;
    Header header;
    header.kind = kind;
    header.length = static_cast<uint32_t>(payload.size());
    BufferRef record = pool_.take();
    record->size = kRecordOverhead + payload.size();
    link->seal(header, payload.data(), record->record);
    link->enqueue(std::move(record));
  }
  const auto deadline = std::chrono::steady_clock::now() + kLastWords;
  for (;;) {
    std::vector<pollfd> unsent;
    for (const auto& link : links_) {
      if (!link || link->idle()) continue;
      try {
        link->flush();
      } catch (const Failure&) {
        continue;  // it is gone, and we are going
      }
      if (!link->idle()) unsent.push_back({link->socket(), POLLOUT, 0});
    }
    const auto left = deadline - std::chrono::steady_clock::now();
    if (unsent.empty() || left.count() <= 0) break;
    // A ring has no event to wait for here; a millisecond's nap serves both kinds of pipe.
    ::poll(nullptr, 0, 1);
  }
  for (const auto& link : links_) {
    if (link) link->end_writing();
  }
  const auto delivered = [this] {
    return std::all_of(links_.begin(), links_.end(),
                       [](const auto& link) { return !link || link->delivered(); });
  };
  while (!delivered() && std::chrono::steady_clock::now() < deadline) ::poll(nullptr, 0, 1);
}

// The keys' destructors overwrite them.
void Engine::wipe() {
  for (auto& link : links_) link.reset();
  for (auto& key : keyring_.groups) key.reset();
  keyring_.own_group.reset();
}

void Engine::update_account() {
  const std::lock_guard<std::mutex> lock(account_lock_);
  account_.stats = stats_;
  account_.waited_s.resize(links_.size(), 0.0);
  account_.rekeys.resize(links_.size(), 0);
  if (keyring_.own_group) account_.rekeys[rank_] = keyring_.own_group->rekeys();
  account_.memory_bytes = pool_.bytes() + stats_.scratch_bytes;
  for (size_t peer = 0; peer < links_.size(); ++peer) {
    if (!links_[peer]) continue;
    account_.waited_s[peer] = static_cast<double>(links_[peer]->waited_ns) * 1e-9;
    account_.rekeys[peer] = links_[peer]->rekeys();
    account_.memory_bytes += links_[peer]->memory_bytes();
  }
}

Engine::Account Engine::account() const {
  const std::lock_guard<std::mutex> lock(account_lock_);
  return account_;
}

std::pair<uint64_t, uint64_t> Engine::sealed_and_opened() const {
  const std::lock_guard<std::mutex> lock(account_lock_);
  return {account_.stats.sealed_bytes, account_.stats.opened_bytes};
}

}  // namespace sealring
