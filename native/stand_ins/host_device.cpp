#include "stand_ins/host_device.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <new>
#include <stdexcept>

#include "record/record.hpp"
#include "stand_ins/gpu_arithmetic.hpp"

namespace sealring {
namespace {

constexpr std::align_val_t kAlign{64};

// One record of a run.
struct Part {
  Header header;
  std::array<uint8_t, kHeaderBytes + kContextBytes> associated;
  size_t at;  // where the record's payload begins in the plaintext
  uint8_t* sealed;

  Part(const Device::Record& run, size_t number) : at(number * kGpuPayload) {
    if (!Header::decode(run.header.data(), header)) throw std::logic_error("no header");
    header.length = static_cast<uint32_t>(std::min(run.length - at, kGpuPayload));
    header.count += number;
    header.segment += static_cast<uint32_t>(number);
    header.encode(associated.data());
    std::memcpy(associated.data() + kHeaderBytes, run.context.data(), kContextBytes);
    sealed = run.area.at + number * (kGpuPayload + kRecordOverhead);
  }
  uint8_t* payload() const { return sealed + kSealedHeaderBytes; }
  uint8_t* tag() const { return payload() + header.length; }
  Nonce nonce(uint32_t lane_bit) const { return make_nonce(header.lane | lane_bit, header.count); }
};

}  // namespace

uint8_t* HostDevice::take_pinned_memory(size_t bytes) {
  return static_cast<uint8_t*>(operator new(bytes, kAlign));
}
void HostDevice::free_pinned_memory(uint8_t* memory) { operator delete(memory, kAlign); }

Device::Area HostDevice::share(size_t bytes, std::vector<uint8_t>& handle) {
  shared_.push_back(std::make_unique<uint8_t[]>(bytes));
  uint8_t* const at = shared_.back().get();
  handle.resize(sizeof at);
  std::memcpy(handle.data(), &at, sizeof at);
  return {at, true};
}

Device::Area HostDevice::reach(std::span<const uint8_t> handle) {
  uint8_t* at = nullptr;
  if (handle.size() < sizeof at) throw std::runtime_error("no such memory");
  std::memcpy(&at, handle.data(), sizeof at);
  return {at, true};
}

Device::Area HostDevice::own_area(size_t bytes) {
  shared_.push_back(std::make_unique<uint8_t[]>(bytes));
  return {shared_.back().get(), true};
}

std::vector<uint8_t> HostDevice::new_meeting_id(int) { return HostMeeting::new_id(); }

void HostDevice::begin_meeting(std::span<const uint8_t> id, int rank, int world) {
  meeting_ = HostMeeting(id, rank, world);
}

bool HostDevice::exchange(const Exchange& next) {
  for (const Transfer& each : next.sends) meeting_.send(each);
  exchanges_[next.channel].push_back(next);
  return true;
}

uint64_t HostDevice::exchanged(size_t channel) {
  std::deque<Exchange>& begun = exchanges_[channel];
  while (!begun.empty()) {
    std::vector<Transfer>& left = begun.front().receives;
    while (!left.empty() && meeting_.receive(left.front())) left.erase(left.begin());
    if (!left.empty()) break;
    begun.pop_front();
    ++exchanged_[channel];
  }
  return exchanged_[channel];
}

int HostDevice::add_key(const KeyBytes& key) {
  if (static_cast<int>(keys_.size()) == key_slots_)
    throw std::logic_error("more keys than a group has");
  keys_.emplace_back();
  const int slot = static_cast<int>(keys_.size()) - 1;
  replace_key(slot, key);
  return slot;
}

// Copies only the bytes: the key may come from another module, which has its own memory for keys.
void HostDevice::replace_key(int slot, const KeyBytes& key) {
  std::memcpy(keys_.at(slot).data(), key.data(), kKeyBytes);
}

void HostDevice::begin(const Setting& setting) {
  setting_ = setting;
  scratch_.resize(setting.scratch_bytes);
  exchanges_.clear();
  exchanged_.clear();
  probe_->log.clear();
}

Device::Ticket HostDevice::give(const char* what, size_t bytes, State outcome) {
  if (probe_->broken) throw std::runtime_error("it was told to");
  probe_->log.push_back(what + std::string(" ") + std::to_string(bytes));
  unsettled_.push_back({next_, outcome});
  return next_++;
}

Device::Ticket HostDevice::seal(uint64_t, const Record& record, const uint8_t* plain) {
  const KeyBytes& key = keys_.at(record.key);
  for (size_t number = 0; number < records_in_run(record.length); ++number) {
    const Part part(record, number);
    std::memcpy(part.sealed, part.associated.data(), kHeaderBytes);
    gpu_seal(key, part.nonce(kHeaderLane), part.associated, nullptr, 0, nullptr,
             part.sealed + kHeaderBytes);
    gpu_seal(key, part.nonce(0), part.associated, plain + part.at, part.header.length,
             part.payload(), part.tag());
  }
  return give("seal", record.length, State::done);
}

bool HostDevice::open_run(const Record& record, std::vector<uint8_t>& plain) const {
  const KeyBytes& key = keys_.at(record.key);
  // Reads the record once, because a peer can write there.
  std::vector<uint8_t> own(record.area.at, record.area.at + sealed_run_bytes(record.length));
  Record copied = record;
  copied.area = {own.data()};
  for (size_t number = 0; number < records_in_run(record.length); ++number) {
    const Part part(copied, number);
    const bool good = std::memcmp(part.sealed, part.associated.data(), kHeaderBytes) == 0 &&
                      gpu_open(key, part.nonce(kHeaderLane), part.associated, nullptr, 0,
                               part.sealed + kHeaderBytes, nullptr) &&
                      gpu_open(key, part.nonce(0), part.associated, part.payload(),
                               part.header.length, part.tag(), plain.data() + part.at);
    if (!good) return false;
  }
  return true;
}

Device::Ticket HostDevice::open(uint64_t, const Record& record, uint8_t* into, bool reduces) {
  std::vector<uint8_t> plain(record.length);
  const bool good = open_run(record, plain);
  if (good && reduces) {
    reduce_function(setting_.dtype, setting_.reduction)(into, plain.data(), record.length);
  } else if (good && record.length != 0) {
    std::memcpy(into, plain.data(), record.length);
  }
  return give(reduces ? "open_reduce" : "open", record.length, good ? State::done : State::refused);
}

Device::State HostDevice::settle(Ticket ticket) {
  Unsettled& oldest = unsettled_.front();
  if (oldest.ticket != ticket) throw std::logic_error("tickets are settled in order");
  if (++oldest.asked <= lag_) return State::pending;
  const State outcome = oldest.outcome;
  unsettled_.pop_front();
  return outcome;
}

void HostDevice::copy(uint64_t, uint8_t* into, const uint8_t* from, size_t bytes) {
  probe_->log.push_back("copy " + std::to_string(bytes));
  std::memcpy(into, from, bytes);
}
void HostDevice::reduce(uint64_t, uint8_t* into, const uint8_t* from, size_t bytes) {
  probe_->log.push_back("reduce " + std::to_string(bytes));
  reduce_function(setting_.dtype, setting_.reduction)(into, from, bytes);
}
void HostDevice::average(uint64_t, uint8_t* into, size_t bytes) {
  probe_->log.push_back("average " + std::to_string(bytes));
  sealring::average(setting_.dtype, into, bytes, setting_.world);
}
void HostDevice::premultiply(uint64_t, uint8_t* into, size_t bytes) {
  probe_->log.push_back("premultiply " + std::to_string(bytes));
  sealring::premultiply(setting_.dtype, into, bytes, setting_.factor);
}

}  // namespace sealring
