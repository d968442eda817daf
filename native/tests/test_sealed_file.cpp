#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include <unistd.h>

#include "check.hpp"
#include "vault/parallel.hpp"
#include "vault/problem.hpp"
#include "vault/sealed_file_reader.hpp"
#include "vault/sealed_file_writer.hpp"

using namespace sealring;

namespace {

const KeyBytes kKey{1, 2, 3, 4, 5};
constexpr uint8_t kContext[] = {7, 8, 9};

std::vector<uint8_t> plain_of(size_t bytes) {
  std::vector<uint8_t> out(bytes);
  for (size_t i = 0; i < bytes; ++i) out[i] = static_cast<uint8_t>(i * 31 + (i >> 8));
  return out;
}

std::vector<uint8_t> sealed_of(const std::vector<uint8_t>& plain, Suite suite, size_t threads) {
  SealedFileWriter writer(SealedFileWriter::kToMemory, kKey, suite, kContext, "file", threads);
  const SealedFileWriter::Plain piece(plain);
  writer.write({&piece, 1});
  writer.finish();
  return writer.take();
}

SealedFileReader reader_of(const std::vector<uint8_t>& sealed, Suite suite, size_t threads) {
  return {[&sealed](uint64_t offset, uint8_t* into, size_t bytes) {
            std::memcpy(into, sealed.data() + offset, bytes);
          },
          sealed.size(),
          kKey,
          suite,
          kContext,
          "file",
          threads};
}

template <typename Call>
bool fails_as(FileProblem problem, const Call& call) {
  try {
    call();
  } catch (const SealedFileError& error) {
    return error.problem == problem;
  }
  return false;
}

}  // namespace

TEST(lengths_follow_from_each_other) {
  for (const uint64_t plain : {0ul, 1ul, 16383ul, 16384ul, 16385ul, 1ul << 40}) {
    CHECK(plain_length(sealed_length(plain)) == plain);
  }
  for (const uint64_t sealed : {0ul, 55ul, 56ul, 71ul, 56ul + 16400, 56ul + 16400 + 15}) {
    CHECK(!plain_length(sealed));
  }
  CHECK(!plain_length(chunk_offset(kMaxChunks) + kTagBytes));
}

TEST(nonces_of_chunks_differ_in_their_last_bytes) {
  const Nonce base{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12};
  CHECK(chunk_nonce(base, 0) == base);
  const Nonce other = chunk_nonce(base, 0x0102);
  CHECK(other[11] == (12 ^ 2) && other[10] == (11 ^ 1) && other[9] == 10 && other[0] == 1);
}

TEST(several_threads_read_what_several_threads_wrote) {
  const auto plain = plain_of(70 * kChunkBytes + 1234);
  for (const Suite suite : {Suite::aes_256_gcm, Suite::chacha20_poly1305}) {
    const auto sealed = sealed_of(plain, suite, 3);
    CHECK(sealed.size() == sealed_length(plain.size()));
    auto reader = reader_of(sealed, suite, 3);
    std::vector<uint8_t> out(plain.size());
    // Runs that overlap and are not in order.
    const WantedRun runs[] = {
        {plain.size() / 2, plain.size() - plain.size() / 2, out.data() + plain.size() / 2},
        {0, plain.size() / 2, out.data()},
        {5, 10, out.data() + 5}};
    reader.read(runs);
    CHECK(out == plain);
    std::vector<uint8_t> again(plain.size());
    const WantedRun whole{0, again.size(), again.data()};
    reader.read({&whole, 1}, Seen::by_this_process);
    CHECK(again == plain);
    CHECK(reader.verify(0, reader.chunks()) == reader.chunks());
  }
}

// threat: V1
TEST(a_changed_chunk_is_refused_in_every_thread) {
  auto sealed = sealed_of(plain_of(70 * kChunkBytes), Suite::aes_256_gcm, 2);
  auto reader = reader_of(sealed, Suite::aes_256_gcm, 3);
  for (uint64_t chunk = 0; chunk < 70; chunk += 9) sealed[chunk_offset(chunk) + 3] ^= 1;
  std::vector<uint8_t> out(70 * kChunkBytes);
  const WantedRun run{0, out.size(), out.data()};
  CHECK(fails_as(FileProblem::tampered, [&] { reader.read({&run, 1}); }));
  CHECK(fails_as(FileProblem::out_of_range, [&] {
    const WantedRun far{reader.length(), 1, out.data()};
    reader.read({&far, 1});
  }));
}

TEST(a_changed_chunk_leaves_nothing_where_it_was_opened) {
  auto sealed = sealed_of(plain_of(3 * kChunkBytes), Suite::aes_256_gcm, 1);
  auto reader = reader_of(sealed, Suite::aes_256_gcm, 1);
  sealed[chunk_offset(1) + 3] ^= 1;
  for (const Seen seen : {Seen::by_others, Seen::by_this_process}) {
    std::vector<uint8_t> out(3 * kChunkBytes);
    const WantedRun run{0, out.size(), out.data()};
    CHECK(fails_as(FileProblem::tampered, [&] { reader.read({&run, 1}, seen); }));
    CHECK(std::all_of(out.begin() + kChunkBytes, out.end(), [](uint8_t one) { return one == 0; }));
  }
}

TEST(close_waits_for_reads_and_later_ones_are_refused) {
  const auto plain = plain_of(200 * kChunkBytes);
  const auto sealed = sealed_of(plain, Suite::aes_256_gcm, 1);
  auto reader = reader_of(sealed, Suite::aes_256_gcm, 2);
  std::vector<uint8_t> out(plain.size());
  const WantedRun run{0, out.size(), out.data()};
  std::atomic<bool> begun{false};
  std::thread reading([&] {
    // Until the file is closed, each read gives all of the plaintext.
    while (!fails_as(FileProblem::closed, [&] { reader.read({&run, 1}); })) {
      CHECK(out == plain);
      begun = true;
    }
  });
  while (!begun) std::this_thread::yield();
  reader.close();
  reading.join();
  CHECK(fails_as(FileProblem::closed, [&] { reader.verify(0, 1); }));
  CHECK(fails_as(FileProblem::closed, [&] { reader.key(); }));
  reader.close();
  CHECK(reader.length() == plain.size());
}

TEST(work_that_throws_ends_the_rest) {
  size_t done = 0;
  bool caught = false;
  try {
    share_work(1000, 1, [&](size_t at) {
      if (at == 10) throw std::runtime_error("stop");
      ++done;
    });
  } catch (const std::runtime_error&) {
    caught = true;
  }
  CHECK(caught && done == 10);
}

int main(int argc, char** argv) { return testing::run(argc, argv); }
