#include "record/record.hpp"

namespace sealring {
namespace {

template <typename T>
void put(uint8_t* at, T value) {
  for (size_t i = 0; i < sizeof(T); ++i) at[i] = static_cast<uint8_t>(value >> (8 * i));
}

template <typename T>
T take(const uint8_t* at) {
  T value = 0;
  for (size_t i = 0; i < sizeof(T); ++i)
    value = static_cast<T>(value | (static_cast<T>(at[i]) << (8 * i)));
  return value;
}

using Associated = std::array<uint8_t, kHeaderBytes + kContextBytes>;

Associated associated_data(const uint8_t* header, const Context& context) {
  Associated data;
  std::memcpy(data.data(), header, kHeaderBytes);
  std::memcpy(data.data() + kHeaderBytes, context.data(), kContextBytes);
  return data;
}

}  // namespace

void Header::encode(uint8_t* out) const {
  out[0] = 'S';
  out[1] = 'R';
  out[2] = kVersion;
  out[3] = static_cast<uint8_t>(kind);
  put(out + 4, length);
  put(out + 8, count);
  put(out + 16, lane);
  put(out + 20, generation);
  put(out + 24, sender);
  put(out + 28, receiver);
  put(out + 32, collective);
  out[40] = operation;
  out[41] = dtype;
  out[42] = reduction;
  out[43] = algorithm;
  put(out + 44, message);
  put(out + 48, segment);
  put(out + 52, root);
  put(out + 56, total);
}

bool Header::decode(const uint8_t* in, Header& header) {
  if (in[0] != 'S' || in[1] != 'R' || in[2] != kVersion) return false;
  if (in[3] < static_cast<uint8_t>(Kind::pair) || in[3] > static_cast<uint8_t>(Kind::fetched)) {
    return false;
  }
  header.kind = static_cast<Kind>(in[3]);
  header.length = take<uint32_t>(in + 4);
  header.count = take<uint64_t>(in + 8);
  header.lane = take<uint32_t>(in + 16);
  header.generation = take<uint32_t>(in + 20);
  header.sender = take<uint32_t>(in + 24);
  header.receiver = take<uint32_t>(in + 28);
  header.collective = take<uint64_t>(in + 32);
  header.operation = in[40];
  header.dtype = in[41];
  header.reduction = in[42];
  header.algorithm = in[43];
  header.message = take<uint32_t>(in + 44);
  header.segment = take<uint32_t>(in + 48);
  header.root = take<uint32_t>(in + 52);
  header.total = take<uint64_t>(in + 56);
  return header.length <= kMaxPayload && (header.lane & kHeaderLane) == 0;
}

namespace {

void seal_header_with(Aead::Use& key, const Context& context, const Header& header, uint8_t* out) {
  header.encode(out);
  key.seal(make_nonce(header.lane | kHeaderLane, header.count), associated_data(out, context),
           nullptr, 0, nullptr, out + kHeaderBytes);
}

}  // namespace

void seal_header(SealingKey& key, const Context& context, const Header& header, uint8_t* out) {
  Aead::Use use(key.aead());
  seal_header_with(use, context, header, out);
}

void seal_record(SealingKey& key, const Context& context, Header& header, const uint8_t* plain,
                 uint8_t* out) {
  const SealingKey::Reservation place = key.advance(header.length);
  header.generation = place.generation;
  header.count = place.count;
  Aead::Use use(key.aead());  // the key is expanded once for both
  seal_header_with(use, context, header, out);
  uint8_t* payload = out + kSealedHeaderBytes;
  use.seal(make_nonce(header.lane, header.count), associated_data(out, context), plain,
           header.length, payload, payload + header.length);
}

bool authentic_header(OpeningKey& key, const Context& context, const Header& header,
                      const uint8_t* sealed) {
  return key.authentic(header.generation, make_nonce(header.lane | kHeaderLane, header.count),
                       associated_data(sealed, context), sealed + kHeaderBytes);
}

bool open_payload(OpeningKey& key, const Context& context, const Header& header,
                  const uint8_t* record, uint8_t* plain) {
  const uint8_t* payload = record + kSealedHeaderBytes;
  return key.open(make_nonce(header.lane, header.count), associated_data(record, context), payload,
                  header.length, payload + header.length, plain);
}

}  // namespace sealring
