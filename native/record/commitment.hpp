// A rank's later evidence of a link's traffic: running hashes over (context, header, tags) of the records
// that carry data, in each direction (docs/spec.md, section 17). Both ends of a link have the same hashes.
//
// A tag alone commits to nothing: both ends hold the key, and can find two records with one tag.
#pragma once

#include <openssl/evp.h>

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "record/record.hpp"

namespace sealring {

// The hash of one direction of a link. Any thread may read it while another adds to it.
class RecordHash {
 public:
  struct Value {
    uint64_t records;
    std::array<uint8_t, 32> digest;
  };

  RecordHash(const Context& context, uint32_t sender, uint32_t receiver);

  // Adds a record that leaves, or that was found authentic. Records without data are not counted.
  void add(const uint8_t* record, size_t size);
  // Adds a record that a device will open. It counts, in its place, once confirm() was called for it.
  void expect(const uint8_t* record, size_t size);
  // Says that the oldest expected record is authentic.
  void confirm();
  // Empty if a record was sent or received whose tag the host does not see.
  std::optional<Value> value() const;

 private:
  static constexpr size_t kEntryBytes = kSealedHeaderBytes + kTagBytes;
  struct Entry {
    std::array<uint8_t, kEntryBytes> bytes;
    bool authentic;
  };

  void take(const uint8_t* record, size_t size, bool authentic);
  void hash(const Entry& entry);

  mutable std::mutex lock_;
  std::unique_ptr<EVP_MD_CTX, decltype(&EVP_MD_CTX_free)> state_;
  std::deque<Entry> waiting_;  // begins with the first record not known to be authentic
  uint64_t records_ = 0;
  bool kept_ = true;
};

struct LinkCommitment {
  LinkCommitment(const Context& context, int rank, int peer, uint32_t lane);
  const int peer;
  const uint32_t lane;
  RecordHash sent;
  RecordHash received;
};

// The commitments of all links of one end of a group; they outlive the links.
class CommitmentTable {
 public:
  std::shared_ptr<LinkCommitment> add(const Context& context, int rank, int peer, uint32_t lane);
  std::vector<std::shared_ptr<const LinkCommitment>> all() const;

 private:
  mutable std::mutex lock_;
  std::vector<std::shared_ptr<LinkCommitment>> links_;
};

}  // namespace sealring
