// Alerts: the layout of their bytes, and that any bytes at all can be decoded.

#include <random>
#include <string>
#include <vector>

#include "check.hpp"
#include "record/alert.hpp"

using namespace sealring;

namespace {

Failure some_failure() {
  Failure failure(FailureCode::replayed, 0x01020304, "record 7 came a second time");
  failure.collective = 0x1112131415161718;
  return failure;
}

}  // namespace

TEST(alert_is_laid_out_as_specified) {
  const std::vector<uint8_t> bytes = encode_alert(some_failure(), 5);
  const std::vector<uint8_t> fixed = {3,    4,    3,    2,    1,    5,    0,    0,
                                      0,  // code, about, seen by
                                      0x18, 0x17, 0x16, 0x15, 0x14, 0x13, 0x12, 0x11};
  CHECK(std::vector<uint8_t>(bytes.begin(), bytes.begin() + 17) == fixed);
  CHECK(std::string(bytes.begin() + 17, bytes.end()) == "record 7 came a second time");
}

TEST(alert_comes_back_as_it_went) {
  const Failure back = decode_alert(encode_alert(some_failure(), 5), 9, 12, 16);
  CHECK(back.code == FailureCode::replayed);
  CHECK(back.peer == 0x01020304);
  CHECK(back.reported_by == 5);  // who saw it, not who passed it on
  CHECK(back.told_by == 9);
  CHECK(back.collective == 0x1112131415161718);
  CHECK(std::string(back.what()) == "record 7 came a second time");
}

TEST(first_witness_stays_the_one_named) {
  const Failure once = decode_alert(encode_alert(some_failure(), 5), 5, 12, 16);
  const Failure twice = decode_alert(encode_alert(once, 6), 6, 12, 16);
  CHECK(twice.reported_by == 5);
  CHECK(twice.told_by == 6);
}

TEST(who_was_told_is_no_witness) {
  Failure invented = some_failure();
  // The receiver itself, or a number that is no rank of the group.
  for (int witness : {12, 16, 1 << 30}) {
    invented.reported_by = witness;
    CHECK(decode_alert(encode_alert(invented, 5), 5, 12, 16).reported_by == 5);
  }
  CHECK(decode_alert(encode_alert(some_failure(), -1), 5, 12, 16).reported_by == 5);
}

TEST(failure_about_no_rank_stays_so) {
  const Failure back =
      decode_alert(encode_alert(Failure(FailureCode::closed, -1, ""), 2), 2, 12, 16);
  CHECK(back.peer == -1);
}

TEST(every_code_travels) {
  for (int code = 1; code <= 7; ++code) {
    const Failure failure(static_cast<FailureCode>(code), 1, "x");
    CHECK(decode_alert(encode_alert(failure, 0), 0, 12, 16).code == failure.code);
  }
}

TEST(unreadable_alert_is_still_an_alert) {
  for (int code : {0, 9, 255}) {
    std::vector<uint8_t> bytes = encode_alert(some_failure(), 5);
    bytes[0] = static_cast<uint8_t>(code);
    const Failure back = decode_alert(bytes, 9, 12, 16);
    CHECK(back.code == FailureCode::peer_lost);
    CHECK(back.peer == 9);
    CHECK(back.reported_by == 9);
  }
  const std::vector<uint8_t> whole = encode_alert(some_failure(), 5);
  for (size_t size = 0; size < 17; ++size) {
    CHECK(decode_alert(std::span(whole).first(size), 9, 12, 16).code == FailureCode::peer_lost);
  }
  CHECK(decode_alert(std::span(whole).first(17), 9, 12, 16).code == FailureCode::replayed);
}

// threat: W12
TEST(text_is_cut_and_cleaned) {
  const Failure loud(FailureCode::tampered, 1, std::string(2000, 'a'));
  CHECK(encode_alert(loud, 0).size() == 17 + kMaxAlertText);
  std::vector<uint8_t> bytes = encode_alert(Failure(FailureCode::tampered, 1, ""), 0);
  for (int c = 0; c < 256; ++c) bytes.push_back(static_cast<uint8_t>(c));
  const std::string text = decode_alert(bytes, 0, 12, 16).what();
  CHECK(text.size() == 256 || text.size() == std::strlen(text.c_str()));
  for (char c : text) CHECK(c >= 0x20 && c < 0x7f);
  bytes.resize(5000, 'b');
  CHECK(std::string(decode_alert(bytes, 0, 12, 16).what()).size() == kMaxAlertText);
}

// threat: W13
TEST(any_bytes_are_survived) {
  std::mt19937 random(1);
  for (int i = 0; i < 20000; ++i) {
    std::vector<uint8_t> bytes(random() % 64);
    for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
    const Failure back = decode_alert(bytes, 3, 12, 16);
    CHECK(is_failure_code(static_cast<uint8_t>(back.code)));
    const Failure again = decode_alert(encode_alert(back, 0), 3, 12, 16);
    CHECK(again.code == back.code && again.peer == back.peer &&
          again.collective == back.collective);
  }
}

int main(int argc, char** argv) { return testing::run(argc, argv); }
