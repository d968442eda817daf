// What a rank can show of a link's traffic later: running hashes over (context, header, tags) of the records
// that carry data, in each direction (docs/spec.md, section 17). Both ends of a link have the same ones.
//
// A tag alone is no commitment: both ends hold the key, and can find two records with one tag.
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

// One direction of a link. May be read by any thread while another one adds to it.
class RecordHash {
 public:
  struct Value {
    uint64_t records;
    std::array<uint8_t, 32> digest;
  };

  RecordHash(const Context& context, uint32_t sender, uint32_t receiver);

  // A record that leaves, or that was found authentic. Records that carry no data are not counted.
  void add(const uint8_t* record, size_t size);
  // A record that a device will open. It counts, in its place, once `confirm` was called for it.
  void expect(const uint8_t* record, size_t size);
  // The oldest record that is expected is authentic.
  void confirm();
  // Nothing if a record went by whose tag the host does not see.
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
  std::deque<Entry> waiting_;  // from the first that is not known to be authentic
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

// Of all links of one end of a group; they outlive the links.
class CommitmentTable {
 public:
  std::shared_ptr<LinkCommitment> add(const Context& context, int rank, int peer, uint32_t lane);
  std::vector<std::shared_ptr<const LinkCommitment>> all() const;

 private:
  mutable std::mutex lock_;
  std::vector<std::shared_ptr<LinkCommitment>> links_;
};

}  // namespace sealring
