// How an engine's wires are offered, opened and used, and how the ranks' devices meet.
#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <string>

#include "collective/engine.hpp"

namespace sealring {

void Engine::offer_wires(uint32_t slots, size_t payload,
                         const std::function<Device::Area(size_t)>& make) {
  require_process();
  require_device();
  if (slots == 0 || payload < kGpuPayload || payload % kGpuPayload != 0) {
    throw std::invalid_argument("a slot must hold whole records");
  }
  auto wires = std::make_unique<Wires>(world(), slots, payload);
  wires->own = make(Wires::area_bytes(slots, payload));
  const std::lock_guard<RunLock> lock(running_);
  device_->make_room(payload);  // now, while this rank can still refuse wires
  wires_ = std::move(wires);
}

void Engine::open_wire(int peer, Device::Area area) {
  require_process();
  const std::lock_guard<RunLock> lock(running_);
  if (!wires_) throw std::invalid_argument("no wires were offered");
  wires_->area_of(peer) = area;
}

void Engine::mark_mixed() {
  require_process();
  const std::lock_guard<RunLock> lock(running_);
  if (!wires_) throw std::invalid_argument("no wires were offered");
  wires_->mixed = true;
}

void Engine::offer_exchanges(size_t half_bytes) {
  require_process();
  require_device();
  const std::lock_guard<RunLock> lock(running_);
  if (!wires_) wires_ = std::make_unique<Wires>(world(), 1, kGpuPayload);
  wires_->leaving = device_->own_area(2 * half_bytes).at;
  wires_->arriving = device_->own_area(2 * half_bytes).at;
  wires_->half_bytes = half_bytes;
}

void Engine::meet(std::span<const uint8_t> id, const std::vector<int>& peers, double patience_s) {
  require_process();
  const std::lock_guard<RunLock> lock(running_);
  if (!wires_ || wires_->half_bytes == 0) throw std::invalid_argument("no exchanges were offered");
  require_alive();
  device_->begin_meeting(id, rank_, world());
  try {
    wait_for_exchanges(patience_s);
  } catch (...) {
    device_->drop_exchanges();
    throw;
  }
  for (int peer : peers) wires_->exchange_with(peer);
}

void Engine::connect(const std::vector<int>& peers, double patience_s) {
  require_process();
  const std::lock_guard<RunLock> lock(running_);
  require_alive();
  const auto exchanges = [this](int peer) { return wires_->exchanges_with(peer); };
  if (!wires_ || !std::all_of(peers.begin(), peers.end(), exchanges))
    throw std::invalid_argument("a peer with which nothing is exchanged");
  device_->enter();
  try {
    device_->begin_connecting(peers);
    wait_for_exchanges(patience_s);
  } catch (...) {
    // Abandons all exchanges: a half-made connection would make them wait.
    device_->abandon();
    throw;
  }
}

void Engine::wait_for_exchanges(double patience_s) {
  const auto since = std::chrono::steady_clock::now();
  while (!device_->exchanges_ready()) {
    // A peer's end is seen first on its link. The peer's last record stays there for the next collective to
    // report.
    std::vector<Link*> sleepers;
    for (const auto& link : links_) {
      if (!link) continue;
      link->fill();
      if (!link->ready()) sleepers.push_back(link.get());
      const bool said_last =
          link->ready() && (link->header().kind == Kind::bye || link->header().kind == Kind::alert);
      if (said_last || link->ended()) throw peer_closed(link->peer, "the peer left the group");
    }
    const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - since;
    if (waited.count() > patience_s)
      throw std::runtime_error("the ranks' GPUs did not all meet within " +
                               std::to_string(static_cast<int64_t>(std::min(patience_s, 1e15))) +
                               " s");
    if (interrupted_) throw std::runtime_error("the group was closed meanwhile");
    sleep_on(sleepers, -1, kPollDeviceMs);
  }
}

Device::Area Engine::map_wire(int file, size_t bytes) {
  require_process();
  const std::lock_guard<RunLock> lock(running_);
  require_device();
  mapped_.emplace_back(file, bytes);
  return device_->reach_host(mapped_.back().data(), bytes);
}

void Engine::use_wires() {
  require_process();
  const std::lock_guard<RunLock> lock(running_);
  if (!wires_ || failure_ || closed_) return;
  keyring_.wire_slots = wires_->slots();
}

void Engine::drop_wires() {
  require_process();
  const std::lock_guard<RunLock> lock(running_);
  if (keyring_.wire_slots != 0) throw std::invalid_argument("the wires are in use");
  if (wires_ && wires_->exchanges()) device_->drop_exchanges();
  wires_.reset();
}

}  // namespace sealring
