// ChaCha20-Poly1305 of RFC 8439: one source for the GPU and the CPU.
//
// NVRTC compiles this file without standard headers, so it includes none. The C++ compiler compiles the same
// text for machines without a GPU, where it is checked against the official vectors.
//
// Poly1305 is a polynomial in r over the message's 16-byte blocks, modulo 2^130 - 5. Many threads
// evaluate one polynomial: each takes every n-th 64-byte block and steps by a power of r, and the
// sums are joined by further powers. Numbers are five limbs of 26 bits, so that the 64-bit columns
// of several products can be added before anything is carried.
#pragma once

#ifdef __CUDACC__
#define SEALRING_EVERYWHERE __device__ __forceinline__
#define SEALRING_UNROLL _Pragma("unroll")
#define SEALRING_ROLLED _Pragma("unroll 1")
#else
#define SEALRING_EVERYWHERE inline
#define SEALRING_UNROLL
#define SEALRING_ROLLED
#endif

namespace sealring::chacha {

using u8 = unsigned char;
using u32 = unsigned int;
using u64 = unsigned long long;

constexpr u32 kLimbMask = 0x3ffffff;

// ---- ChaCha20 ----------------------------------------------------------------------------------

#ifdef __CUDACC__
// A GPU has one pipe for logic and shifts and another for multiplication, and plain ChaCha20 would use only
// the first. So additions are written as multiply-adds with a factor 1 that the compiler does not know, and
// go to the second.
SEALRING_EVERYWHERE u32 add(u32 a, u32 b, u32 one) {
  u32 sum;
  asm("mad.lo.u32 %0, %1, %2, %3;" : "=r"(sum) : "r"(b), "r"(one), "r"(a));
  return sum;
}
SEALRING_EVERYWHERE u32 rotate16(u32 x) { return __byte_perm(x, x, 0x1032); }
SEALRING_EVERYWHERE u32 rotate8(u32 x) { return __byte_perm(x, x, 0x2103); }
SEALRING_EVERYWHERE u32 rotate(u32 x, int n) { return __funnelshift_l(x, x, n); }
SEALRING_EVERYWHERE u32 join_right(u32 low, u32 high, int n) {
  return __funnelshift_r(low, high, n);
}
#else
SEALRING_EVERYWHERE u32 add(u32 a, u32 b, u32) { return a + b; }
SEALRING_EVERYWHERE u32 rotate(u32 x, int n) { return x << n | x >> (32 - n); }
SEALRING_EVERYWHERE u32 rotate16(u32 x) { return rotate(x, 16); }
SEALRING_EVERYWHERE u32 rotate8(u32 x) { return rotate(x, 8); }
SEALRING_EVERYWHERE u32 join_right(u32 low, u32 high, int n) { return low >> n | high << (32 - n); }
#endif

SEALRING_EVERYWHERE void quarter_round(u32& a, u32& b, u32& c, u32& d, u32 one) {
  a = add(a, b, one), d = rotate16(d ^ a);
  c = add(c, d, one), b = rotate(b ^ c, 12);
  a = add(a, b, one), d = rotate8(d ^ a);
  c = add(c, d, one), b = rotate(b ^ c, 7);
}

struct Nonce {
  u32 word[3];
};

SEALRING_EVERYWHERE void double_round(u32 (&x)[16], u32 one) {
  quarter_round(x[0], x[4], x[8], x[12], one);
  quarter_round(x[1], x[5], x[9], x[13], one);
  quarter_round(x[2], x[6], x[10], x[14], one);
  quarter_round(x[3], x[7], x[11], x[15], one);
  quarter_round(x[0], x[5], x[10], x[15], one);
  quarter_round(x[1], x[6], x[11], x[12], one);
  quarter_round(x[2], x[7], x[8], x[13], one);
  quarter_round(x[3], x[4], x[9], x[14], one);
}

// Makes 64 bytes of keystream. `one` is 1. `key(words)` fetches the key when it is needed, so that it need
// not stay in registers. Of the ten double rounds, `at_a_time` are written out: fewer make shorter code,
// which a GPU fetches sooner.
template <int at_a_time, class Key>
SEALRING_EVERYWHERE void keystream(Key key, u32 counter, const Nonce& nonce, u32 one,
                                   u32 (&x)[16]) {
  constexpr u32 kConstant[4] = {0x61707865, 0x3320646e, 0x79622d32, 0x6b206574};
  SEALRING_UNROLL
  for (int i = 0; i < 4; ++i) x[i] = kConstant[i];
  u32 words[8];
  key(words);
  SEALRING_UNROLL
  for (int i = 0; i < 8; ++i) x[4 + i] = words[i];
  x[12] = counter, x[13] = nonce.word[0], x[14] = nonce.word[1], x[15] = nonce.word[2];
  SEALRING_ROLLED
  for (int i = 0; i < 10 / at_a_time; ++i) {
    SEALRING_UNROLL
    for (int k = 0; k < at_a_time; ++k) double_round(x, one);
  }
  SEALRING_UNROLL
  for (int i = 0; i < 4; ++i) x[i] = add(x[i], kConstant[i], one);
  key(words);
  SEALRING_UNROLL
  for (int i = 0; i < 8; ++i) x[4 + i] = add(x[4 + i], words[i], one);
  x[12] = add(x[12], counter, one);
  SEALRING_UNROLL
  for (int i = 0; i < 3; ++i) x[13 + i] = add(x[13 + i], nonce.word[i], one);
}

// ---- Poly1305: numbers -------------------------------------------------------------------------

// A number below 2^130 or a little above; limbs may exceed 26 bits by a few.
struct Number {
  u32 limb[5];
};

// The sum of products, not carried. A product of carried numbers adds less than 2^57 to a column.
struct Columns {
  u64 at[5];
};

// A 16-byte block, with the extra bit that RFC 8439 appends above it.
SEALRING_EVERYWHERE Number number_of(u32 a, u32 b, u32 c, u32 d, u32 above) {
  return {{a & kLimbMask, join_right(a, b, 26) & kLimbMask, join_right(b, c, 20) & kLimbMask,
           join_right(c, d, 14) & kLimbMask, d >> 8 | above << 24}};
}

SEALRING_EVERYWHERE Columns columns_of(const Number& n) {
  return {{n.limb[0], n.limb[1], n.limb[2], n.limb[3], n.limb[4]}};
}

// A number to multiply by. What exceeds 2^130 returns at the bottom times five, so the limbs times five are
// kept too. Twelve words: three wide loads.
struct alignas(16) Factor {
  u32 limb[5];
  u32 five[4];  // limbs 1 to 4, times five
  u32 unused[3];
};

SEALRING_EVERYWHERE Factor factor_of(const Number& n) {
  return {{n.limb[0], n.limb[1], n.limb[2], n.limb[3], n.limb[4]},
          {n.limb[1] * 5, n.limb[2] * 5, n.limb[3] * 5, n.limb[4] * 5},
          {}};
}

SEALRING_EVERYWHERE Number number_of(const Factor& f) {
  return {{f.limb[0], f.limb[1], f.limb[2], f.limb[3], f.limb[4]}};
}

// sum += h * r
SEALRING_EVERYWHERE void add_product(Columns& sum, const Number& h, const Factor& r) {
  const u32 s1 = r.five[0], s2 = r.five[1], s3 = r.five[2], s4 = r.five[3];
  const u32(&a)[5] = h.limb;
  const u32(&b)[5] = r.limb;
  sum.at[0] += (u64)a[0] * b[0] + (u64)a[1] * s4 + (u64)a[2] * s3 + (u64)a[3] * s2 + (u64)a[4] * s1;
  sum.at[1] +=
      (u64)a[0] * b[1] + (u64)a[1] * b[0] + (u64)a[2] * s4 + (u64)a[3] * s3 + (u64)a[4] * s2;
  sum.at[2] +=
      (u64)a[0] * b[2] + (u64)a[1] * b[1] + (u64)a[2] * b[0] + (u64)a[3] * s4 + (u64)a[4] * s3;
  sum.at[3] +=
      (u64)a[0] * b[3] + (u64)a[1] * b[2] + (u64)a[2] * b[1] + (u64)a[3] * b[0] + (u64)a[4] * s4;
  sum.at[4] +=
      (u64)a[0] * b[4] + (u64)a[1] * b[3] + (u64)a[2] * b[2] + (u64)a[3] * b[1] + (u64)a[4] * b[0];
}

SEALRING_EVERYWHERE Number carried(Columns sum) {
  Number out;
  SEALRING_UNROLL
  for (int i = 0; i < 4; ++i) {
    out.limb[i] = (u32)sum.at[i] & kLimbMask;
    sum.at[i + 1] += sum.at[i] >> 26;
  }
  out.limb[4] = (u32)sum.at[4] & kLimbMask;
  const u64 low = out.limb[0] + (sum.at[4] >> 26) * 5;
  out.limb[0] = (u32)low & kLimbMask;
  out.limb[1] += (u32)(low >> 26);
  return out;
}

SEALRING_EVERYWHERE Number product(const Number& h, const Factor& r) {
  Columns sum = {{0, 0, 0, 0, 0}};
  add_product(sum, h, r);
  return carried(sum);
}

// h * r + next
SEALRING_EVERYWHERE Number joined(const Number& h, const Factor& r, const Number& next) {
  Columns sum = columns_of(next);
  add_product(sum, h, r);
  return carried(sum);
}

// (h + block) * r: one step as the RFC writes it.
SEALRING_EVERYWHERE Number absorbed(const Number& h, const Number& block, const Factor& r) {
  Number sum;
  SEALRING_UNROLL
  for (int i = 0; i < 5; ++i) sum.limb[i] = h.limb[i] + block.limb[i];
  return product(sum, r);
}

// ---- Poly1305: one record ----------------------------------------------------------------------

// r, and what is added at the end.
struct OneTimeKey {
  Factor r;
  u32 pad[4];
};

template <class Key>
SEALRING_EVERYWHERE OneTimeKey one_time_key(Key key, const Nonce& nonce, u32 one) {
  u32 x[16];
  keystream<1>(key, 0, nonce, one, x);
  const Number r =
      number_of(x[0] & 0x0fffffff, x[1] & 0x0ffffffc, x[2] & 0x0ffffffc, x[3] & 0x0ffffffc, 0);
  return {factor_of(r), {x[4], x[5], x[6], x[7]}};
}

// How a record is divided. Its whole 64-byte blocks are right-aligned in parts * (kThreads << log_turns)
// places. So every block has the same power of r as its weight, whatever the record's length; empty places at
// the front add nothing. Thread t of a part takes places t, t + kThreads, ..., one a turn. It adds up the
// products of kGroup turns before it carries.
constexpr int kNextWarp = 5;  // index into `doubling`: the next 32 blocks
constexpr int kNextTurn = 7;  // and the next kThreads
#ifndef SEALRING_LOG_GROUP
#define SEALRING_LOG_GROUP 2
#endif
constexpr int kLogGroup = SEALRING_LOG_GROUP;
constexpr int kNextGroup = kNextTurn + kLogGroup;
constexpr int kLanes = 1 << kNextWarp;
constexpr int kThreads = 1 << kNextTurn;
constexpr int kWarps = kThreads / kLanes;
constexpr int kGroup = 1 << kLogGroup;
static_assert(57 + 5 <= 64 && 4 * kGroup + 2 < 1 << 5, "a column holds a group's products");

SEALRING_EVERYWHERE int next_part(u32 log_turns) { return kNextTurn + (int)log_turns; }

// The powers of r that are blocks' weights, and that join the threads' sums. `doubling[k]` is r^(4 * 2^k),
// the weight of 2^k blocks; `weight[k][i]` is r^(i + 1), k turns before the group's end.
constexpr int kMaxDoublings = 15;  // 16384 blocks, the longest record
struct Powers {
  Factor weight[kGroup][4];
  Factor doubling[kMaxDoublings];
};

// Makes the powers that depend on each other, one after the other.
SEALRING_EVERYWHERE void make_powers(const Factor& r, int doublings, Powers& powers) {
  const Number square = product(number_of(r), r);
  const Factor twice = factor_of(square);
  Factor power = factor_of(product(square, twice));
  powers.weight[0][0] = r;
  powers.weight[0][1] = twice;
  powers.weight[0][2] = factor_of(product(square, r));
  powers.weight[0][3] = power;
  powers.doubling[0] = power;
  SEALRING_ROLLED
  for (int k = 1; k < doublings; ++k) {
    power = factor_of(product(number_of(power), power));
    powers.doubling[k] = power;
  }
}

// Makes the other powers, after make_powers(). `helpers` threads share the work; h is this thread's number.
SEALRING_EVERYWHERE void make_weights(int h, int helpers, Powers& powers) {
  const Factor& turn = powers.doubling[kNextTurn];
  for (int at = h; at < 4 * (kGroup - 1); at += helpers) {
    Number weight = number_of(powers.weight[0][at % 4]);
    SEALRING_ROLLED
    for (int k = 0; k <= at / 4; ++k) weight = product(weight, turn);
    powers.weight[1 + at / 4][at % 4] = factor_of(weight);
  }
}

// Adds the four 16-byte blocks of 64 bytes of ciphertext to the sum; the last block has the least weight.
// `power(i)` gives the block's weight[.][i] when it is needed.
template <class Power>
SEALRING_EVERYWHERE void add_block(Columns& sum, const u32 (&w)[16], Power power) {
  SEALRING_UNROLL
  for (int i = 0; i < 4; ++i) {
    add_product(sum, number_of(w[4 * i], w[4 * i + 1], w[4 * i + 2], w[4 * i + 3], 1),
                power(3 - i));
  }
}

// Absorbs `bytes` bytes, the last block padded with zeros, as RFC 8439 does with associated data.
// `word(i)` gives the i-th 32-bit word, zeros past the end.
template <class Words>
SEALRING_EVERYWHERE Number absorb_padded(Number h, const Factor& r, u32 bytes, Words word) {
  SEALRING_ROLLED
  for (u32 at = 0; at < bytes; at += 16) {
    const u32 i = at / 4;
    h = absorbed(h, number_of(word(i), word(i + 1), word(i + 2), word(i + 3), 1), r);
  }
  return h;
}

struct Tag {
  u32 word[4];
};

// The last step: absorbs the lengths, reduces modulo 2^130 - 5 and adds the pad.
SEALRING_EVERYWHERE Tag tag_of(const Number& absorbed_all, const OneTimeKey& key, u64 associated,
                               u64 bytes) {
  Number h = absorbed(
      absorbed_all,
      number_of((u32)associated, (u32)(associated >> 32), (u32)bytes, (u32)(bytes >> 32), 1),
      key.r);
  u32 carry = 0;
  // Twice: the first round can leave a carry out of the top, which comes back at the bottom.
  for (int round = 0; round < 2; ++round) {
    SEALRING_UNROLL
    for (int i = 0; i < 5; ++i) {
      h.limb[i] += carry;
      carry = h.limb[i] >> 26;
      h.limb[i] &= kLimbMask;
    }
    carry *= 5;
  }
  h.limb[0] += carry;
  // h - p, and whether that is the smaller one, without a branch on secret data.
  Number less;
  carry = 5;
  SEALRING_UNROLL
  for (int i = 0; i < 5; ++i) {
    less.limb[i] = h.limb[i] + carry;
    carry = less.limb[i] >> 26;
    less.limb[i] &= kLimbMask;
  }
  const u32 take_less = 0u - carry;
  SEALRING_UNROLL
  for (int i = 0; i < 5; ++i) {
    h.limb[i] = (h.limb[i] & ~take_less) | (less.limb[i] & take_less);
  }
  const u32 low[4] = {h.limb[0] | h.limb[1] << 26, h.limb[1] >> 6 | h.limb[2] << 20,
                      h.limb[2] >> 12 | h.limb[3] << 14, h.limb[3] >> 18 | h.limb[4] << 8};
  Tag tag;
  u64 sum = 0;
  SEALRING_UNROLL
  for (int i = 0; i < 4; ++i) {
    sum += (u64)low[i] + key.pad[i];
    tag.word[i] = (u32)sum;
    sum >>= 32;
  }
  return tag;
}

// Compares without a branch that would tell where two tags first differ.
SEALRING_EVERYWHERE bool same(const Tag& a, const Tag& b) {
  return ((a.word[0] ^ b.word[0]) | (a.word[1] ^ b.word[1]) | (a.word[2] ^ b.word[2]) |
          (a.word[3] ^ b.word[3])) == 0;
}

}  // namespace sealring::chacha
