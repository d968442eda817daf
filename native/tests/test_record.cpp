// The record's bytes: header, nonces, ratchet and a whole sealed record, each compared with constants that
// were computed independently (with Python's cryptography, from the layout in docs/spec.md).

#include <algorithm>
#include <vector>

#include "check.hpp"
#include "record/record.hpp"

using namespace sealring;

namespace {

Header distinct() {
  Header header;
  header.kind = Kind::group;
  header.length = 0x00040302;
  header.count = 0x1817161514131211;
  header.lane = 0x24232221;
  header.generation = 0x34333231;
  header.sender = 0x44434241;
  header.receiver = 0x54535251;
  header.collective = 0x6867666564636261;
  header.operation = 0x71;
  header.dtype = 0x72;
  header.reduction = 0x73;
  header.algorithm = 0x74;
  header.message = 0x84838281;
  header.segment = 0x94939291;
  header.root = 0x98979695;
  header.total = 0xa8a7a6a5a4a3a2a1;
  return header;
}

// The header's bytes by offset, as docs/spec.md gives them.
constexpr uint8_t kDistinct[kHeaderBytes] = {
    'S',  'R',  1,    2,  //  0 magic, version, kind
    0x02, 0x03, 0x04, 0x00,  //  4 length
    0x11, 0x12, 0x13, 0x14, 0x15, 0x16, 0x17, 0x18,  //  8 count
    0x21, 0x22, 0x23, 0x24,  // 16 lane
    0x31, 0x32, 0x33, 0x34,  // 20 generation
    0x41, 0x42, 0x43, 0x44,  // 24 sender
    0x51, 0x52, 0x53, 0x54,  // 28 receiver
    0x61, 0x62, 0x63, 0x64, 0x65, 0x66, 0x67, 0x68,  // 32 collective
    0x71, 0x72, 0x73, 0x74,  // 40 operation .. algorithm
    0x81, 0x82, 0x83, 0x84,  // 44 message
    0x91, 0x92, 0x93, 0x94,  // 48 segment
    0x95, 0x96, 0x97, 0x98,  // 52 root
    0xa1, 0xa2, 0xa3, 0xa4, 0xa5, 0xa6, 0xa7, 0xa8,  // 56 total
};

KeyBytes counting_key() {
  KeyBytes key;
  for (size_t i = 0; i < key.size(); ++i) key[i] = static_cast<uint8_t>(i);
  return key;
}

const KeyBytes kOnce = {0xd1, 0xd0, 0xff, 0x39, 0xab, 0x9d, 0xb4, 0x15, 0x8f, 0x59, 0xc5,
                        0x4e, 0x5a, 0x1f, 0xc7, 0x31, 0x87, 0xbf, 0x9f, 0x93, 0x88, 0x72,
                        0xe8, 0xfa, 0x3a, 0x82, 0xd6, 0x6e, 0x65, 0x20, 0x72, 0xc5};
const KeyBytes kTwice = {0xae, 0x24, 0xfc, 0x07, 0xd5, 0xa7, 0x1e, 0x2c, 0xa3, 0x54, 0xf2,
                         0xd1, 0x4a, 0x17, 0x94, 0x11, 0x9e, 0xe4, 0xc8, 0x11, 0x90, 0x59,
                         0x44, 0xf2, 0xc5, 0xc8, 0xbd, 0x66, 0x69, 0x6c, 0x72, 0x17};

// AES-256-GCM of "hello" from rank 1 to rank 2 under counting_key(), in context 40 41 .. 5f.
constexpr uint8_t kSealed[] = {
    0x53, 0x52, 0x01, 0x01, 0x05, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00,
    0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x01, 0x00, 0x00, 0x00, 0x02, 0x00,
    0x00, 0x00, 0x08, 0x07, 0x06, 0x05, 0x04, 0x03, 0x02, 0x01, 0x01, 0x03, 0x01, 0x02, 0x07,
    0x00, 0x00, 0x00, 0x09, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x14, 0x00, 0x00, 0x00,
    0x00, 0x00, 0x00, 0x00, 0xf3, 0x19, 0xc1, 0xa5, 0xb2, 0x67, 0x29, 0x64, 0x28, 0xf5, 0xef,
    0x06, 0xa8, 0xbf, 0x52, 0xda, 0x66, 0xd9, 0xd9, 0xb2, 0xda, 0x26, 0xa8, 0xb2, 0xdf, 0x89,
    0x76, 0x35, 0xc4, 0x71, 0x3b, 0x36, 0x84, 0xc4, 0x48, 0x3d, 0x15};

Context counting_context() {
  Context context;
  for (size_t i = 0; i < context.size(); ++i) context[i] = static_cast<uint8_t>(0x40 + i);
  return context;
}

Header of_sealed() {
  Header header;
  header.kind = Kind::pair;
  header.length = 5;
  header.sender = 1;
  header.receiver = 2;
  header.collective = 0x0102030405060708;
  header.operation = 1;
  header.dtype = 3;
  header.reduction = 1;
  header.algorithm = 2;
  header.message = 7;
  header.segment = 9;
  header.total = 20;
  return header;
}

bool same(const Header& a, const Header& b) {
  return a.kind == b.kind && a.length == b.length && a.count == b.count && a.lane == b.lane &&
         a.generation == b.generation && a.sender == b.sender && a.receiver == b.receiver &&
         a.collective == b.collective && a.operation == b.operation && a.dtype == b.dtype &&
         a.reduction == b.reduction && a.algorithm == b.algorithm && a.message == b.message &&
         a.segment == b.segment && a.root == b.root && a.total == b.total;
}

}  // namespace

TEST(header_is_laid_out_as_specified) {
  uint8_t bytes[kHeaderBytes];
  distinct().encode(bytes);
  for (size_t i = 0; i < kHeaderBytes; ++i) CHECK_NOTE(bytes[i] == kDistinct[i], "byte %zu", i);
}

TEST(header_comes_back_as_it_went) {
  Header header;
  CHECK(Header::decode(kDistinct, header));
  CHECK(same(header, distinct()));
}

// Whatever byte is changed, the header is refused, or decodes to another header that encodes to exactly these
// bytes. So no two encodings mean the same.
TEST(every_byte_of_a_header_means_something) {
  for (size_t i = 0; i < kHeaderBytes; ++i) {
    for (int value = 0; value < 256; ++value) {
      uint8_t bytes[kHeaderBytes];
      std::copy_n(kDistinct, kHeaderBytes, bytes);
      bytes[i] = static_cast<uint8_t>(value);
      Header header;
      if (!Header::decode(bytes, header)) continue;
      uint8_t again[kHeaderBytes];
      header.encode(again);
      CHECK_NOTE(std::equal(bytes, bytes + kHeaderBytes, again), "byte %zu is %d", i, value);
      CHECK(same(header, distinct()) == (kDistinct[i] == value));
    }
  }
}

TEST(malformed_headers_are_refused) {
  const auto refused = [](size_t at, uint8_t value) {
    uint8_t bytes[kHeaderBytes];
    std::copy_n(kDistinct, kHeaderBytes, bytes);
    bytes[at] = value;
    Header header;
    return !Header::decode(bytes, header);
  };
  CHECK(refused(0, 's'));
  CHECK(refused(1, 's'));
  CHECK(refused(2, 0));
  CHECK(refused(2, 2));
  CHECK(refused(3, 0));
  CHECK(!refused(3, 1));
  CHECK(!refused(3, 4));
  CHECK(!refused(3, 9));
  CHECK(refused(3, 10));
  CHECK(!refused(6, 0x0f));
  CHECK(refused(6, 0x10));  // one mebibyte and two bytes more
  CHECK(refused(7, 0x01));
  CHECK(refused(19, 0xa4));  // a lane with the bit that marks a header's nonce
}

TEST(longest_payload_is_one_mebibyte) {
  Header header;
  header.length = kMaxPayload;
  uint8_t bytes[kHeaderBytes];
  header.encode(bytes);
  CHECK(Header::decode(bytes, header));
  header.length = kMaxPayload + 1;
  header.encode(bytes);
  CHECK(!Header::decode(bytes, header));
}

TEST(nonce_is_lane_then_count) {
  const Nonce nonce = make_nonce(0x04030201, 0x1817161514131211);
  const Nonce want = {1, 2, 3, 4, 0x11, 0x12, 0x13, 0x14, 0x15, 0x16, 0x17, 0x18};
  CHECK(nonce == want);
}

TEST(ratchet_is_hkdf_expand) {
  CHECK(ratchet(counting_key()) == kOnce);
  CHECK(ratchet(kOnce) == kTwice);
}

// threat: K17
TEST(record_is_sealed_as_specified) {
  SealingKey key(counting_key(), 1u << 30);
  Header header = of_sealed();
  uint8_t out[sizeof kSealed];
  seal_record(key, counting_context(), header, reinterpret_cast<const uint8_t*>("hello"), out);
  CHECK(std::equal(out, out + sizeof out, kSealed));
}

TEST(record_opens) {
  OpeningKey key(counting_key());
  Header header;
  CHECK(Header::decode(kSealed, header));
  CHECK(authentic_header(key, counting_context(), header, kSealed));
  uint8_t plain[5];
  CHECK(open_payload(key, counting_context(), header, kSealed, plain));
  CHECK(std::equal(plain, plain + 5, "hello"));
}

// threat: W2
TEST(no_changed_byte_opens) {
  for (size_t i = 0; i < sizeof kSealed; ++i) {
    for (int bit = 0; bit < 8; ++bit) {
      uint8_t changed[sizeof kSealed];
      std::copy_n(kSealed, sizeof kSealed, changed);
      changed[i] = static_cast<uint8_t>(changed[i] ^ (1 << bit));
      OpeningKey key(counting_key());
      Header header;
      if (!Header::decode(changed, header)) continue;
      const bool authentic = authentic_header(key, counting_context(), header, changed);
      CHECK_NOTE(authentic == (i >= kSealedHeaderBytes), "byte %zu, bit %d", i, bit);
      if (!authentic) continue;
      uint8_t plain[5];
      CHECK_NOTE(!open_payload(key, counting_context(), header, changed, plain), "byte %zu", i);
    }
  }
}

// threat: W8
TEST(every_byte_of_the_context_is_bound) {
  for (size_t i = 0; i < kContextBytes; ++i) {
    Context other = counting_context();
    other[i] ^= 1;
    OpeningKey key(counting_key());
    Header header;
    CHECK(Header::decode(kSealed, header));
    CHECK(!authentic_header(key, other, header, kSealed));
    uint8_t plain[5];
    CHECK(!open_payload(key, other, header, kSealed, plain));
  }
}

// threat: K2
TEST(key_seals_no_more_than_its_limit) {
  SealingKey key(counting_key(), 100);
  const size_t sizes[] = {50, 10, 60, 200, 0, 0, 30, 90};
  uint64_t sealed = 0;
  uint32_t generation = 0;
  uint64_t count = 0;
  for (size_t bytes : sizes) {
    const SealingKey::Reservation place = key.advance(bytes);
    CHECK(place.count == count++);  // continues across ratchets
    CHECK(place.generation == generation || place.generation == generation + 1);
    if (place.generation != generation) sealed = 0;
    generation = place.generation;
    sealed += bytes;
    // Only a single record may exceed the limit: it gets a key of its own.
    CHECK(sealed <= 100 || sealed == bytes);
  }
  CHECK(generation == 4);
}

// threat: K2
TEST(opening_follows_one_generation_at_a_time) {
  SealingKey sealing(counting_key(), 1);  // a new key for every record
  std::vector<std::vector<uint8_t>> records;
  for (int i = 0; i < 4; ++i) {
    Header header = of_sealed();
    records.emplace_back(kRecordOverhead + 5);
    seal_record(sealing, counting_context(), header, reinterpret_cast<const uint8_t*>("hello"),
                records.back().data());
  }
  OpeningKey key(counting_key());
  const auto authentic = [&](int i) {
    Header header;
    CHECK(Header::decode(records[i].data(), header));
    CHECK(header.generation == static_cast<uint32_t>(i));
    return authentic_header(key, counting_context(), header, records[i].data());
  };
  CHECK(!authentic(2));  // two ahead
  CHECK(authentic(0));
  CHECK(authentic(1));
  CHECK(!authentic(0));  // older generations are refused
  CHECK(authentic(2));
  CHECK(authentic(3));
}

// threat: W3
TEST(forged_generation_does_not_move_the_ratchet) {
  SealingKey sealing(counting_key(), 1u << 30);
  Header header = of_sealed();
  uint8_t record[sizeof kSealed];
  seal_record(sealing, counting_context(), header, reinterpret_cast<const uint8_t*>("hello"),
              record);
  OpeningKey key(counting_key());
  uint8_t forged[sizeof kSealed];
  std::copy_n(record, sizeof record, forged);
  forged[20] = 1;
  Header claimed;
  CHECK(Header::decode(forged, claimed));
  CHECK(!authentic_header(key, counting_context(), claimed, forged));
  CHECK(authentic_header(key, counting_context(), header, record));
}

int main(int argc, char** argv) { return testing::run(argc, argv); }
