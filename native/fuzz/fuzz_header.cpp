// Decodes any bytes as a header: an accepted header encodes to the same bytes.
#include "record/record.hpp"
#include "script.hpp"

using namespace sealring;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < kHeaderBytes) return 0;
  Header header;
  if (!Header::decode(data, header)) return 0;
  fuzz::require(header.length <= kMaxPayload && (header.lane & kHeaderLane) == 0);
  std::array<uint8_t, kHeaderBytes> again;
  header.encode(again.data());
  fuzz::require(std::memcmp(again.data(), data, kHeaderBytes) == 0);
  return 0;
}
