// The CPU's compilation of the GPU's cipher, with its secrets marked as undefined for memcheck.
//
// memcheck reports every conditional jump and every address that depends on undefined memory, and it
// follows undefined bits through arithmetic. So a run without a report had no branch and no address
// that depended on the key or on the message.
//
// PLANTED_BRANCH and PLANTED_ADDRESS add a leak, to show that the check finds one.
#include <valgrind/memcheck.h>

#include <cstdint>
#include <cstdio>
#include <vector>

#include "stand_ins/gpu_arithmetic.hpp"

using namespace sealring;

namespace {

template <class Bytes>
void make_secret(Bytes& bytes) {
  if (bytes.size() != 0) (void)VALGRIND_MAKE_MEM_UNDEFINED(bytes.data(), bytes.size());
}
template <class Bytes>
void make_public(Bytes& bytes) {
  if (bytes.size() != 0) (void)VALGRIND_MAKE_MEM_DEFINED(bytes.data(), bytes.size());
}

volatile uint8_t sink;

void plant([[maybe_unused]] const KeyBytes& key) {
#ifdef PLANTED_BRANCH
  if (key[0] & 1) sink = 1;
#endif
#ifdef PLANTED_ADDRESS
  static const uint8_t table[256] = {};
  sink = const_cast<const volatile uint8_t*>(table)[key[0]];
#endif
}

bool check(size_t bytes, size_t associated_bytes) {
  KeyBytes key;
  for (size_t i = 0; i < key.size(); ++i) key[i] = static_cast<uint8_t>(3 * i + 1);
  Nonce nonce{};
  std::vector<uint8_t> plain(bytes), cipher(bytes), opened(bytes), tag(16),
      associated(associated_bytes);
  for (size_t i = 0; i < bytes; ++i) plain[i] = static_cast<uint8_t>(7 * i);
  const std::vector<uint8_t> expected = plain;
  make_secret(key);
  make_secret(plain);
  plant(key);
  gpu_seal(key, nonce, associated, plain.data(), bytes, cipher.data(), tag.data());
  // What is sent is public from here on; it is kept secret all the same when it is opened, so that
  // nothing may depend on it before its tag is found good.
  make_secret(cipher);
  make_secret(tag);
  const bool good =
      gpu_open(key, nonce, associated, cipher.data(), bytes, tag.data(), opened.data());
  make_public(tag);
  tag[5] ^= 1;
  make_secret(tag);
  std::vector<uint8_t> untouched(bytes);
  const bool bad =
      gpu_open(key, nonce, associated, cipher.data(), bytes, tag.data(), untouched.data());
  make_public(opened);
  return good && !bad && opened == expected;
}

}  // namespace

int main() {
  if (!RUNNING_ON_VALGRIND) return std::fprintf(stderr, "this runs under valgrind\n"), 2;
  // Empty, parts of a word, of a block and of a turn, whole ones, several parts of a record.
  for (size_t bytes :
       {0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 8191, 8192, 8193, 65536 + 63, 131072, 262144}) {
    for (size_t associated : {0, 5, 96}) {
      if (bytes > 9000 && associated != 96) continue;
      if (!check(bytes, associated))
        return std::fprintf(stderr, "%zu bytes: wrong result\n", bytes), 3;
    }
  }
  std::puts("sealed and opened");
  return 0;
}
