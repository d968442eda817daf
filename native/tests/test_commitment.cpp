// Running hashes over a link's records: equal at both ends, and only over authentic records.

#include <cstring>

#include "check.hpp"
#include "record/commitment.hpp"
#include "two_ends.hpp"

using namespace sealring;
using namespace sealring::testing;

namespace {

using Value = RecordHash::Value;

Value sent(const End& end) { return *end.keyring.commitments->all()[0]->sent.value(); }
Value received(const End& end) { return *end.keyring.commitments->all()[0]->received.value(); }
bool same(const Value& one, const Value& other) {
  return one.records == other.records && one.digest == other.digest;
}

void carry(End& from, End& to) {
  while (!from.link.idle()) from.link.flush();
  to.receive();
  to.open();
}

// A record as bytes: header, tag, payload and tag are all `fill`, except for the kind.
std::vector<uint8_t> record_of(Kind kind, uint8_t fill, size_t bytes = kRecordOverhead + 3) {
  std::vector<uint8_t> record(bytes, fill);
  record[3] = static_cast<uint8_t>(kind);
  return record;
}

}  // namespace

TEST(both_ends_of_a_link_have_the_same_commitments) {
  TwoEnds ends;
  const std::vector<uint8_t> text{1, 2, 3};
  for (int i = 0; i < 5; ++i) {
    ends.zero.enqueue(text, i % 2 ? Kind::pair : Kind::group);
    carry(ends.zero, ends.one);
    CHECK(same(sent(ends.zero), received(ends.one)));
    CHECK(sent(ends.zero).records == static_cast<uint64_t>(i + 1));
  }
  CHECK(same(sent(ends.one), received(ends.zero)));
  CHECK(sent(ends.one).records == 0);
  // Each direction starts with a different hash: an empty direction cannot be shown as another one.
  CHECK(sent(ends.one).digest != RecordHash({}, 0, 1).value()->digest);
}

TEST(records_that_carry_no_data_do_not_count) {
  TwoEnds ends;
  const Value before = sent(ends.zero);
  ends.zero.enqueue({1}, Kind::status);
  carry(ends.zero, ends.one);
  CHECK(same(sent(ends.zero), before));
  CHECK(received(ends.one).records == 0);
}

// threat: L19
TEST(a_changed_record_is_not_counted_by_its_receiver) {
  TwoEnds ends;
  ends.zero.enqueue({1, 2, 3});
  while (!ends.zero.link.idle()) ends.zero.link.flush();
  ends.one.receive();
  ends.one.link.arrived_payload()[0] ^= 1;
  bool failed = false;
  try {
    ends.one.open();
  } catch (const Failure& failure) {
    failed = failure.code == FailureCode::tampered;
  }
  CHECK(failed);
  CHECK(received(ends.one).records == 0);
}

TEST(header_and_both_tags_are_committed_to_and_the_payload_by_its_tag) {
  const std::vector<uint8_t> record = record_of(Kind::pair, 7);
  RecordHash plain({}, 0, 1);
  plain.add(record.data(), record.size());
  for (size_t at = 0; at < record.size(); ++at) {
    if (at == 3) continue;  // the kind
    std::vector<uint8_t> changed = record;
    changed[at] ^= 1;
    RecordHash other({}, 0, 1);
    other.add(changed.data(), changed.size());
    const bool ciphertext = at >= kSealedHeaderBytes && at < kSealedHeaderBytes + 3;
    CHECK_NOTE((other.value()->digest == plain.value()->digest) == ciphertext, "byte %zu", at);
  }
  RecordHash elsewhere({1}, 0, 1);
  elsewhere.add(record.data(), record.size());
  CHECK(elsewhere.value()->digest != plain.value()->digest);
}

TEST(what_a_device_opens_counts_in_the_order_of_arrival) {
  const std::vector<uint8_t> one = record_of(Kind::data, 1), two = record_of(Kind::announce, 2),
                             three = record_of(Kind::data, 3);
  RecordHash wanted({}, 0, 1);
  for (const auto* each : {&one, &two, &three}) wanted.add(each->data(), each->size());
  RecordHash found({}, 0, 1);
  found.expect(one.data(), one.size());
  found.add(two.data(), two.size());  // the host opens it before the device has opened the first
  found.expect(three.data(), three.size());
  CHECK(found.value()->records == 0);
  found.confirm();
  CHECK(found.value()->records == 2);
  found.confirm();
  CHECK(same(*found.value(), *wanted.value()));
}

TEST(nothing_is_said_where_the_host_does_not_see_the_tags) {
  const std::vector<uint8_t> header = record_of(Kind::pair, 1, kSealedHeaderBytes);
  RecordHash hash({}, 0, 1);
  CHECK(hash.value().has_value());
  hash.expect(header.data(), header.size());
  hash.confirm();
  CHECK(!hash.value().has_value());
}

int main(int argc, char** argv) { return run(argc, argv); }
