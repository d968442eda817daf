// Decodes any bytes as an alert: the failure prints as plain text, and encoding and decoding it again keeps
// it.
#include "record/alert.hpp"

#include <cstring>

#include "script.hpp"

using namespace sealring;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const Failure failure = decode_alert({data, size}, 3, 2, 5);
  const size_t length = std::strlen(failure.what());
  fuzz::require(length <= kMaxAlertText);
  for (size_t i = 0; i < length; ++i)
    fuzz::require(failure.what()[i] >= 0x20 && failure.what()[i] < 0x7f);
  fuzz::require(is_failure_code(static_cast<uint8_t>(failure.code)));
  const std::vector<uint8_t> told = encode_alert(failure, 1);
  const Failure heard = decode_alert(told, 1, 2, 5);
  fuzz::require(heard.code == failure.code && heard.peer == failure.peer &&
                heard.collective == failure.collective);
  fuzz::require(failure.reported_by >= 0 && failure.reported_by < 5 && failure.reported_by != 2);
  fuzz::require(heard.says_the_same_as(failure));
  fuzz::require(std::strcmp(heard.what(), failure.what()) == 0);
  return 0;
}
