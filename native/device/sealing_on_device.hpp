// Gives records to a device: puts the key on the device and encodes the header that the record must have.
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

// Puts a key on the device, once per generation. Returns its slot.
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

// Puts all keys on a device that is being attached. If one fails, none counts as being there.
template <typename... Keys>
void put_keys(Device& device, const std::vector<Keys*>&... keys) {
  try {
    ((std::for_each(keys.begin(), keys.end(), [&](Keys* key) { slot_of(device, *key); })), ...);
  } catch (...) {
    ((std::for_each(keys.begin(), keys.end(), [](Keys* key) { key->on_device = {}; })), ...);
    throw;
  }
}

// Gives the header the next number of the key, and reserves the following numbers for the rest of its run.
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

// Passes the authentic header, not the bytes in `area`: the device checks that the record there has this
// header.
inline Device::Ticket open_on(Device& device, uint64_t queue, int key, const Context& context,
                              const Header& header, size_t bytes, Device::Area area, uint8_t* into,
                              bool reduces) {
  std::array<uint8_t, kHeaderBytes> encoded;
  header.encode(encoded.data());
  return device.open(queue, {key, encoded, context, bytes, area}, into, reduces);
}

}  // namespace sealring
