#include "stand_ins/gpu_arithmetic.hpp"

#include <openssl/crypto.h>

#include <algorithm>
#include <vector>

#include "chacha20_poly1305.hpp"

// For tests/constant_time, which treats keys and messages as undefined memory: only whether a tag matched is
// public.
#ifdef SEALRING_CHECK_CONSTANT_TIME
#include <valgrind/memcheck.h>
#define SEALRING_PUBLIC(value) (void)VALGRIND_MAKE_MEM_DEFINED(&(value), sizeof(value))
#else
#define SEALRING_PUBLIC(value) (void)0
#endif

namespace sealring {
namespace {

using namespace chacha;

u32 word_at(const uint8_t* bytes, size_t size, size_t at) {
  u32 word = 0;
  for (size_t i = 0; i < 4 && at + i < size; ++i) word |= static_cast<u32>(bytes[at + i]) << 8 * i;
  return word;
}

// How a record is divided into parts and turns. On a GPU the host chooses this by the record's length.
struct Shares {
  int parts = 1;
  int log_turns = 0;

  explicit Shares(int blocks) {
    // Uses several parts and turns already for short records, so that every weight is used.
    while (log_turns < 3 && blocks > kThreads << log_turns) ++log_turns;
    parts = std::max(1, (blocks + (kThreads << log_turns) - 1) / (kThreads << log_turns));
  }
};

// The sum that one thread of a part forms over its turns.
Number thread_sum(const uint8_t* cipher, const Shares& shares, int first_place, int thread,
                  const Number& associated, const Powers& powers) {
  Number sum = {};
  Columns columns = {};
  const int turns = 1 << shares.log_turns;
  for (int turn = 0; turn < turns; ++turn) {
    const int block = first_place + turn * kThreads + thread;
    const int to_come = (turns - 1 - turn) % kGroup;
    const Factor(&weight)[4] = powers.weight[to_come];
    if (block >= 0) {
      u32 words[16];
      for (int i = 0; i < 16; ++i) words[i] = word_at(cipher + block * 64, 64, 4 * i);
      if (block == 0) add_product(columns, associated, weight[3]);
      add_block(columns, words, [&](int i) -> const Factor& { return weight[i]; });
    }
    if (to_come != 0) continue;
    if (turn >= kGroup) add_product(columns, sum, powers.doubling[kNextGroup]);
    sum = carried(columns);
    columns = {};
  }
  return sum;
}

Number part_sum(const uint8_t* cipher, const Shares& shares, int first_place,
                const Number& associated, const Powers& powers) {
  Number sums[kThreads];
  for (int t = 0; t < kThreads; ++t) {
    sums[t] = thread_sum(cipher, shares, first_place, t, associated, powers);
  }
  for (int warp = 0; warp < kWarps; ++warp) {
    Number* lanes = sums + warp * kLanes;
    for (int level = 0; level < kNextWarp; ++level) {
      for (int lane = 0; lane + (1 << level) < kLanes; ++lane) {
        lanes[lane] = joined(lanes[lane], powers.doubling[level], lanes[lane + (1 << level)]);
      }
    }
  }
  Number sum = sums[0];
  for (int warp = 1; warp < kWarps; ++warp) {
    sum = joined(sum, powers.doubling[kNextWarp], sums[warp * kLanes]);
  }
  return sum;
}

struct Inputs {
  u32 key[8];
  chacha::Nonce nonce;

  Inputs(const KeyBytes& key_bytes, const sealring::Nonce& nonce_bytes) {
    key_bytes.process().require("this key");
    for (int i = 0; i < 8; ++i) key[i] = word_at(key_bytes.data(), 32, 4 * i);
    for (int i = 0; i < 3; ++i) nonce.word[i] = word_at(nonce_bytes.data(), 12, 4 * i);
  }
  Inputs(const Inputs&) = delete;
  Inputs& operator=(const Inputs&) = delete;
  ~Inputs() { OPENSSL_cleanse(key, sizeof key); }
};

auto key_of(const Inputs& inputs) {
  return [&inputs](u32(&words)[8]) { std::copy_n(inputs.key, 8, words); };
}

Tag tag_over(const Inputs& inputs, const uint8_t* associated, size_t associated_bytes,
             const uint8_t* cipher, size_t bytes) {
  const OneTimeKey key = one_time_key(key_of(inputs), inputs.nonce, 1);
  Powers powers;
  make_powers(key.r, kMaxDoublings, powers);
  for (int helper = 0; helper < kLanes; ++helper) make_weights(helper, kLanes, powers);
  const auto words_of = [](const uint8_t* from, size_t size) {
    return [=](u32 i) { return word_at(from, size, size_t{i} * 4); };
  };
  const Number before = absorb_padded(Number{}, key.r, static_cast<u32>(associated_bytes),
                                      words_of(associated, associated_bytes));
  const int blocks = static_cast<int>(bytes / 64);
  const Shares shares(blocks);
  Number h = before;
  if (blocks > 0) {
    const int part_blocks = kThreads << shares.log_turns;
    const int empty = shares.parts * part_blocks - blocks;
    h = part_sum(cipher, shares, -empty, before, powers);
    for (int part = 1; part < shares.parts; ++part) {
      h = joined(h, powers.doubling[next_part(static_cast<u32>(shares.log_turns))],
                 part_sum(cipher, shares, part * part_blocks - empty, before, powers));
    }
  }
  const size_t tail = bytes % 64;
  h = absorb_padded(h, key.r, static_cast<u32>(tail), words_of(cipher + bytes - tail, tail));
  return tag_of(h, key, associated_bytes, bytes);
}

void apply_cipher(const Inputs& inputs, const uint8_t* in, size_t bytes, uint8_t* out) {
  for (size_t at = 0; at < bytes; at += 64) {
    u32 x[16];
    keystream<5>(key_of(inputs), static_cast<u32>(at / 64) + 1, inputs.nonce, 1, x);
    for (size_t i = 0; i < std::min<size_t>(64, bytes - at); ++i) {
      out[at + i] = in[at + i] ^ static_cast<uint8_t>(x[i / 4] >> 8 * (i % 4));
    }
  }
}

}  // namespace

void gpu_seal(const KeyBytes& key, const sealring::Nonce& nonce,
              std::span<const uint8_t> associated, const uint8_t* plain, size_t bytes,
              uint8_t* cipher, uint8_t* tag) {
  const Inputs inputs(key, nonce);
  // A GPU hashes the ciphertext that it has in registers. `own` stands for these, so the output is only
  // written.
  std::vector<uint8_t> own(bytes);
  apply_cipher(inputs, plain, bytes, own.data());
  const Tag made = tag_over(inputs, associated.data(), associated.size(), own.data(), bytes);
  std::copy(own.begin(), own.end(), cipher);
  for (int i = 0; i < 16; ++i) tag[i] = static_cast<uint8_t>(made.word[i / 4] >> 8 * (i % 4));
}

bool gpu_open(const KeyBytes& key, const sealring::Nonce& nonce,
              std::span<const uint8_t> associated, const uint8_t* cipher, size_t bytes,
              const uint8_t* tag, uint8_t* plain) {
  const Inputs inputs(key, nonce);
  Tag sent;
  for (int i = 0; i < 4; ++i) sent.word[i] = word_at(tag, 16, 4 * i);
  bool authentic =
      same(tag_over(inputs, associated.data(), associated.size(), cipher, bytes), sent);
  SEALRING_PUBLIC(authentic);
  if (!authentic) return false;
  apply_cipher(inputs, cipher, bytes, plain);
  return true;
}

}  // namespace sealring
