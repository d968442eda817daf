// Strict DER (X.690): every value has exactly one encoding, and any other encoding is refused.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>

namespace sealring::der {

using Bytes = std::span<const uint8_t>;

struct NotDer : std::runtime_error {
  explicit NotDer(const char* what) : std::runtime_error(what) {}
};

enum Tag : uint8_t {
  kBoolean = 0x01,
  kInteger = 0x02,
  kBitString = 0x03,
  kOctetString = 0x04,
  kNull = 0x05,
  kObject = 0x06,
  kUtcTime = 0x17,
  kGeneralizedTime = 0x18,
  kSequence = 0x30,
  kSet = 0x31,
};

// A tag [number]: explicit (it contains an element) or implicit (it replaces the element's own tag).
constexpr uint8_t explicit_tag(uint8_t number) { return static_cast<uint8_t>(0xa0 | number); }
constexpr uint8_t implicit_tag(uint8_t number) { return static_cast<uint8_t>(0x80 | number); }

struct Element {
  uint8_t tag;
  Bytes whole;  // with tag and length
  Bytes content;
};

// Reads the elements of some content, one after the other. Each call throws NotDer if there is no such
// element.
class Reader {
 public:
  explicit Reader(Bytes content) : rest_(content) {}

  bool done() const { return rest_.empty(); }
  bool next_is(uint8_t tag) const { return !rest_.empty() && rest_[0] == tag; }
  Element next();
  Element take(uint8_t tag);
  Bytes content(uint8_t tag) { return take(tag).content; }
  // Throws unless nothing is left.
  void end() const {
    if (!done()) throw NotDer("there is something behind its end");
  }

 private:
  Bytes rest_;
};

// Reads bytes that must be exactly one element.
Element only(Bytes bytes, uint8_t tag);

// Each of these throws NotDer unless the content is that of such a value.
void require_integer(Bytes content);
void require_object(Bytes content);
void require_bit_string(Bytes content);
bool boolean(Bytes content);
// Not negative, and at most eight bytes long.
uint64_t unsigned_integer(Bytes content);
// Seconds since 1970 of a UTCTime or GeneralizedTime in the form that RFC 5280 allows: to the second, and in
// UTC.
int64_t time(const Element& element);

}  // namespace sealring::der
