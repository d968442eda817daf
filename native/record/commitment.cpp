#include "record/commitment.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <string_view>

#include "keys/sha256.hpp"

namespace sealring {
namespace {

constexpr std::string_view kPurpose{"sealring-1 link commitment\0", 27};

void require(bool good) {
  if (!good) throw std::runtime_error("OpenSSL failed in SHA-256");
}

bool carries_data(uint8_t kind) {
  switch (static_cast<Kind>(kind)) {
    case Kind::pair:
    case Kind::group:
    case Kind::announce:
    case Kind::data:
      return true;
    default:
      return false;
  }
}

}  // namespace

RecordHash::RecordHash(const Context& context, uint32_t sender, uint32_t receiver)
    : state_(EVP_MD_CTX_new(), EVP_MD_CTX_free) {
  std::array<uint8_t, 8> ranks;
  for (size_t i = 0; i < 4; ++i) {
    ranks[i] = static_cast<uint8_t>(sender >> (8 * i));
    ranks[4 + i] = static_cast<uint8_t>(receiver >> (8 * i));
  }
  require(state_ && EVP_DigestInit_ex2(state_.get(), sha256_algorithm(), nullptr) == 1 &&
          EVP_DigestUpdate(state_.get(), kPurpose.data(), kPurpose.size()) == 1 &&
          EVP_DigestUpdate(state_.get(), context.data(), context.size()) == 1 &&
          EVP_DigestUpdate(state_.get(), ranks.data(), ranks.size()) == 1);
}

void RecordHash::add(const uint8_t* record, size_t size) { take(record, size, true); }

void RecordHash::expect(const uint8_t* record, size_t size) { take(record, size, false); }

void RecordHash::take(const uint8_t* record, size_t size, bool authentic) {
  if (!carries_data(record[3])) return;
  const std::lock_guard<std::mutex> lock(lock_);
  if (size < kRecordOverhead) {  // the payload does not take the link
    kept_ = false;
    waiting_.clear();
  }
  if (!kept_) return;
  Entry entry{{}, authentic};
  std::copy_n(record, kSealedHeaderBytes, entry.bytes.begin());
  std::copy_n(record + size - kTagBytes, kTagBytes, entry.bytes.begin() + kSealedHeaderBytes);
  if (authentic && waiting_.empty()) {
    hash(entry);
  } else {
    waiting_.push_back(entry);
  }
}

void RecordHash::confirm() {
  const std::lock_guard<std::mutex> lock(lock_);
  const auto oldest = std::find_if(waiting_.begin(), waiting_.end(),
                                   [](const Entry& entry) { return !entry.authentic; });
  if (oldest == waiting_.end()) return;  // nothing is recorded any more
  oldest->authentic = true;
  for (; !waiting_.empty() && waiting_.front().authentic; waiting_.pop_front()) {
    hash(waiting_.front());
  }
}

void RecordHash::hash(const Entry& entry) {
  require(EVP_DigestUpdate(state_.get(), entry.bytes.data(), entry.bytes.size()) == 1);
  ++records_;
}

std::optional<RecordHash::Value> RecordHash::value() const {
  const std::lock_guard<std::mutex> lock(lock_);
  if (!kept_) return std::nullopt;
  const std::unique_ptr<EVP_MD_CTX, decltype(&EVP_MD_CTX_free)> copy(EVP_MD_CTX_new(),
                                                                     EVP_MD_CTX_free);
  Value value{records_, {}};
  require(copy && EVP_MD_CTX_copy_ex(copy.get(), state_.get()) == 1 &&
          EVP_DigestFinal_ex(copy.get(), value.digest.data(), nullptr) == 1);
  return value;
}

LinkCommitment::LinkCommitment(const Context& context, int rank, int peer, uint32_t lane)
    : peer(peer),
      lane(lane),
      sent(context, static_cast<uint32_t>(rank), static_cast<uint32_t>(peer)),
      received(context, static_cast<uint32_t>(peer), static_cast<uint32_t>(rank)) {}

std::shared_ptr<LinkCommitment> CommitmentTable::add(const Context& context, int rank, int peer,
                                                     uint32_t lane) {
  auto added = std::make_shared<LinkCommitment>(context, rank, peer, lane);
  const std::lock_guard<std::mutex> lock(lock_);
  links_.push_back(added);
  return added;
}

std::vector<std::shared_ptr<const LinkCommitment>> CommitmentTable::all() const {
  const std::lock_guard<std::mutex> lock(lock_);
  return {links_.begin(), links_.end()};
}

}  // namespace sealring
