#include "host_device.hpp"

#include <cstring>
#include <new>
#include <stdexcept>

#include "gpu_arithmetic.hpp"
#include "record.hpp"

namespace sealring {
namespace {

constexpr std::align_val_t kAlign{64};

struct Parsed {
  std::array<uint8_t, kHeaderBytes + kContextBytes> associated;
  Header header;

  explicit Parsed(const Device::Record& record) {
    std::memcpy(associated.data(), record.header.data(), kHeaderBytes);
    std::memcpy(associated.data() + kHeaderBytes, record.context.data(), kContextBytes);
    if (!Header::decode(record.header.data(), header)) throw std::logic_error("no header");
  }
  Nonce nonce(uint32_t lane_bit) const { return make_nonce(header.lane | lane_bit, header.count); }
};

}  // namespace

uint8_t* HostDevice::take_host_memory(size_t bytes) {
  return static_cast<uint8_t*>(operator new(bytes, kAlign));
}
void HostDevice::give_host_memory(uint8_t* memory) { operator delete(memory, kAlign); }

int HostDevice::add_key(const KeyBytes& key) {
  keys_.push_back(key);
  return static_cast<int>(keys_.size()) - 1;
}
void HostDevice::replace_key(int slot, const KeyBytes& key) { keys_.at(slot) = key; }

void HostDevice::begin(const Setting& setting) {
  setting_ = setting;
  scratch_.resize(setting.scratch_bytes);
  log_.clear();
}

Device::Ticket HostDevice::give(const char* what, size_t bytes, State outcome) {
  if (broken_) throw std::runtime_error("it was told to");
  log_.push_back(what + std::string(" ") + std::to_string(bytes));
  unsettled_.push_back({next_, outcome});
  return next_++;
}

Device::Ticket HostDevice::seal(uint64_t, const Record& record, const uint8_t* plain) {
  const Parsed parsed(record);
  const KeyBytes& key = keys_.at(record.key);
  std::memcpy(record.at, record.header.data(), kHeaderBytes);
  gpu_seal(key, parsed.nonce(kHeaderLane), parsed.associated, nullptr, 0, nullptr,
           record.at + kHeaderBytes);
  uint8_t* const payload = record.at + kSealedHeaderBytes;
  gpu_seal(key, parsed.nonce(0), parsed.associated, plain, record.length, payload,
           payload + record.length);
  return give("seal", record.length, State::done);
}

Device::Ticket HostDevice::open(uint64_t, const Record& record, uint8_t* into, bool reduces) {
  const Parsed parsed(record);
  const KeyBytes& key = keys_.at(record.key);
  const uint8_t* const payload = record.at + kSealedHeaderBytes;
  std::vector<uint8_t> plain(record.length);
  const bool good =
      std::memcmp(record.at, record.header.data(), kHeaderBytes) == 0 &&
      gpu_open(key, parsed.nonce(kHeaderLane), parsed.associated, nullptr, 0,
               record.at + kHeaderBytes, nullptr) &&
      gpu_open(key, parsed.nonce(0), parsed.associated, payload, record.length,
               payload + record.length, plain.data());
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
  log_.push_back("copy " + std::to_string(bytes));
  std::memcpy(into, from, bytes);
}
void HostDevice::reduce(uint64_t, uint8_t* into, const uint8_t* from, size_t bytes) {
  log_.push_back("reduce " + std::to_string(bytes));
  reduce_function(setting_.dtype, setting_.reduction)(into, from, bytes);
}
void HostDevice::average(uint64_t, uint8_t* into, size_t bytes) {
  log_.push_back("average " + std::to_string(bytes));
  sealring::average(setting_.dtype, into, bytes, setting_.world);
}
void HostDevice::premultiply(uint64_t, uint8_t* into, size_t bytes) {
  log_.push_back("premultiply " + std::to_string(bytes));
  sealring::premultiply(setting_.dtype, into, bytes, setting_.factor);
}

}  // namespace sealring
