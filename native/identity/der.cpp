#include "identity/der.hpp"

namespace sealring::der {
namespace {

void well_formed(bool good, const char* what) {
  if (!good) throw NotDer(what);
}

int64_t digits(Bytes text, size_t at, size_t count) {
  int64_t value = 0;
  for (const uint8_t digit : text.subspan(at, count)) {
    well_formed(digit >= '0' && digit <= '9', "a time is not one");
    value = 10 * value + (digit - '0');
  }
  return value;
}

bool is_leap(int64_t year) { return year % 4 == 0 && (year % 100 != 0 || year % 400 == 0); }

int64_t days_in(int64_t year, int64_t month) {
  constexpr int64_t kDays[] = {31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31};
  return kDays[month - 1] + (month == 2 && is_leap(year) ? 1 : 0);
}

int64_t days_before(int64_t year) { return 365 * year + year / 4 - year / 100 + year / 400; }

}  // namespace

Element Reader::next() {
  well_formed(rest_.size() >= 2, "it is cut short");
  const uint8_t tag = rest_[0];
  well_formed((tag & 0x1f) != 0x1f, "a tag has another form than certificates use");
  size_t length = rest_[1];
  size_t head = 2;
  if (length >= 0x80) {
    const size_t bytes = length & 0x7f;
    well_formed(bytes >= 1 && bytes <= 4 && rest_.size() >= 2 + bytes, "a length is not one");
    length = 0;
    for (const uint8_t byte : rest_.subspan(2, bytes)) length = length << 8 | byte;
    well_formed(length >= 0x80 && length >> (8 * (bytes - 1)) != 0, "a length is not the shortest");
    head += bytes;
  }
  well_formed(length <= rest_.size() - head, "it is cut short");
  const Element element{tag, rest_.first(head + length), rest_.subspan(head, length)};
  rest_ = rest_.subspan(head + length);
  return element;
}

Element Reader::take(uint8_t tag) {
  well_formed(next_is(tag), "it has not the fields it must have");
  return next();
}

Element only(Bytes bytes, uint8_t tag) {
  Reader reader(bytes);
  const Element element = reader.take(tag);
  reader.end();
  return element;
}

void require_integer(Bytes content) {
  well_formed(!content.empty(), "a number is empty");
  if (content.size() > 1) {
    const bool padded =
        (content[0] == 0x00 && content[1] < 0x80) || (content[0] == 0xff && content[1] >= 0x80);
    well_formed(!padded, "a number is not in its shortest form");
  }
}

void require_object(Bytes content) {
  constexpr size_t kMostBytes = 63;
  // UUIDs have 128 bits: 18 digits of 7, and 2 more.
  constexpr size_t kMostDigits = 19;
  constexpr uint8_t kMostOfFirst = 0x83;
  well_formed(!content.empty() && content.size() <= kMostBytes && content.back() < 0x80,
              "an object identifier is cut short or too long");
  size_t digits = 0;  // digits before this byte, in the number that it belongs to
  uint8_t first = 0;
  for (const uint8_t byte : content) {
    if (digits == 0) first = byte;
    well_formed(first != 0x80, "an object identifier is not in its shortest form");
    ++digits;
    well_formed(digits < kMostDigits || (digits == kMostDigits && first <= kMostOfFirst),
                "a number of an object identifier is too large");
    if (byte < 0x80) digits = 0;
  }
}

void require_bit_string(Bytes content) {
  well_formed(!content.empty() && content[0] < 8, "a bit string is not one");
  const uint8_t unused = content[0];
  if (content.size() == 1) {
    well_formed(unused == 0, "a bit string is not one");
  } else {
    well_formed((content.back() & ((1u << unused) - 1)) == 0,
                "a bit string has bits behind its end");
  }
}

bool boolean(Bytes content) {
  well_formed(content.size() == 1 && (content[0] == 0x00 || content[0] == 0xff),
              "a boolean is not one");
  return content[0] != 0;
}

uint64_t unsigned_integer(Bytes content) {
  require_integer(content);
  well_formed(content[0] < 0x80 && content.size() <= 8, "a number is out of range");
  uint64_t value = 0;
  for (const uint8_t byte : content) value = value << 8 | byte;
  return value;
}

int64_t time(const Element& element) {
  const Bytes text = element.content;
  const bool is_short = element.tag == kUtcTime;
  well_formed(is_short || element.tag == kGeneralizedTime, "a time is not one");
  const size_t year_digits = is_short ? 2 : 4;
  well_formed(text.size() == year_digits + 11 && text.back() == 'Z', "a time is not one");
  int64_t year = digits(text, 0, year_digits);
  if (is_short) year += year < 50 ? 2000 : 1900;
  const int64_t month = digits(text, year_digits, 2);
  const int64_t day = digits(text, year_digits + 2, 2);
  const int64_t hour = digits(text, year_digits + 4, 2);
  const int64_t minute = digits(text, year_digits + 6, 2);
  const int64_t second = digits(text, year_digits + 8, 2);
  well_formed(year >= 1 && month >= 1 && month <= 12 && hour <= 23 && minute <= 59 && second <= 59,
              "a time is not one");
  well_formed(day >= 1 && day <= days_in(year, month), "a time is not one");
  int64_t days = days_before(year - 1) - days_before(1969) + day - 1;
  for (int64_t earlier = 1; earlier < month; ++earlier) days += days_in(year, earlier);
  return ((days * 24 + hour) * 60 + minute) * 60 + second;
}

}  // namespace sealring::der
