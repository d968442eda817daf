// A record as a device is given it: the key where the device finds it, the header as it must be.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "device/device.hpp"
#include "keys/keys.hpp"
#include "record/record.hpp"

namespace sealring {

// Puts a key where the device finds it, once per generation.
template <typename Key>
int slot_of(Device& device, Key& key) {
  key.bytes().require_key();
  DeviceKeySlot& there = key.on_device;
  if (there.slot < 0) {
    there = {device.add_key(key.bytes()), key.generation()};
  } else if (there.generation != key.generation()) {
    device.replace_key(there.slot, key.bytes());
    there.generation = key.generation();
  }
  return there.slot;
}

// All of them, on a device that is being attached; if it cannot take them, it has none.
template <typename... Keys>
void put_keys(Device& device, const std::vector<Keys*>&... keys) {
  try {
    ((std::for_each(keys.begin(), keys.end(), [&](Keys* key) { slot_of(device, *key); })), ...);
  } catch (...) {
    ((std::for_each(keys.begin(), keys.end(), [](Keys* key) { key->on_device = {}; })), ...);
    throw;
  }
}

// Gives the header its place in the key's sequence, and the places behind it to the rest of its run.
inline void reserve(SealingKey& key, Header& header, size_t bytes) {
  const SealingKey::Reservation place = key.advance(bytes, records_in_run(bytes));
  header.generation = place.generation;
  header.count = place.count;
}

inline Device::Ticket seal_on(Device& device, uint64_t queue, SealingKey& key,
                              const Context& context, const Header& header, const uint8_t* plain,
                              size_t bytes, Device::Area area) {
  std::array<uint8_t, kHeaderBytes> encoded;
  header.encode(encoded.data());
  return device.seal(queue, {slot_of(device, key), encoded, context, bytes, area}, plain);
}

// Not with the header as it lies there: the device is told what was found authentic, and finds out
// for itself whether the record has that.
inline Device::Ticket open_on(Device& device, uint64_t queue, int key, const Context& context,
                              const Header& header, size_t bytes, Device::Area area, uint8_t* into,
                              bool reduces) {
  std::array<uint8_t, kHeaderBytes> encoded;
  header.encode(encoded.data());
  return device.open(queue, {key, encoded, context, bytes, area}, into, reduces);
}

}  // namespace sealring
