// Reads any bytes as a member's statement and as a bundle: what is accepted encodes to the same bytes.
#include "handshake/bundle.hpp"
#include "handshake/statements.hpp"

#include "script.hpp"

using namespace sealring;

namespace {

void append(std::vector<uint8_t>& out, der::Bytes field) {
  for (int shift = 24; shift >= 0; shift -= 8) {
    out.push_back(static_cast<uint8_t>(field.size() >> shift));
  }
  out.insert(out.end(), field.begin(), field.end());
}

der::Bytes bytes_of(const std::string& text) {
  return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

void read_as_bundle(der::Bytes bytes) {
  try {
    const std::vector<BundleEntry> entries = read_bundle(bytes);
    fuzz::require(bundle_size(entries) == bytes.size());
    std::vector<uint8_t> again(bytes.size());
    write_bundle(entries, again.data());
    fuzz::require(std::equal(again.begin(), again.end(), bytes.begin()));
  } catch (const MalformedStatement&) {
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const der::Bytes bytes(data, size);
  read_as_bundle(bytes);
  const der::Bytes twice[] = {bytes, bytes};
  try {
    Statements read(twice);
    const Statement& one = read[1];
    std::array<uint8_t, 8> rank;
    for (size_t i = 0; i < 8; ++i) rank[i] = static_cast<uint8_t>(one.rank >> (56 - 8 * i));
    std::vector<uint8_t> again;
    append(again, rank);
    append(again, bytes_of(one.instance));
    append(again, bytes_of(one.host));
    append(again, one.addresses);
    append(again, one.certificate);
    append(again, one.commitment);
    fuzz::require(again.size() + 4 + kContributionBytes == size);
    fuzz::require(std::equal(again.begin(), again.end(), data));
    fuzz::require(one.contribution == sha256(bytes.last(kContributionBytes)));
    fuzz::require(read.transcript({}) == Statements(twice).transcript({}));
    fuzz::require(read.first_wrong_value({}, twice) <= 0);
    if (one.contributes) read.group_secret("salt", "purpose", 32);
  } catch (const MalformedStatement&) {
  }
  return 0;
}
