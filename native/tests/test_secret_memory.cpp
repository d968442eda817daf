// Keys after a fork, in core files and after they are freed.
#include "keys/secret_memory.hpp"

#include <malloc.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "check.hpp"
#include "collective/engine.hpp"
#include "keys/keys.hpp"
#include "mailbox/mailbox.hpp"
#include "record/record.hpp"

using namespace sealring;

namespace {

KeyBytes some_key() {
  KeyBytes key;
  key.fill(0x5a);
  return key;
}

// The C library's fork(), or the bare system call, for which no handlers run.
enum class Way { library, system_call };

pid_t fork_by(Way way) {
  if (way == Way::library) return ::fork();
  return static_cast<pid_t>(::syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0));
}

// Returns what `act` returns in a forked child; 99 if it throws.
int in_child(Way way, const std::function<int()>& act) {
  const pid_t child = fork_by(way);
  if (child == 0) {
    int status = 99;
    try {
      status = act();
    } catch (...) {
    }
    ::_exit(status);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 98;
}

bool refused(const std::function<void()>& call) {
  try {
    call();
  } catch (const ForkedProcess&) {
    return true;
  }
  return false;
}

constexpr Way kWays[] = {Way::library, Way::system_call};

// The kernel's flags for the mapping that contains `at`.
std::string flags_of(const void* at) {
  std::ifstream smaps("/proc/self/smaps");
  std::string line;
  bool inside = false;
  while (std::getline(smaps, line)) {
    unsigned long from = 0, to = 0;
    if (std::sscanf(line.c_str(), "%lx-%lx ", &from, &to) == 2) {
      const auto address = reinterpret_cast<unsigned long>(at);
      inside = from <= address && address < to;
    } else if (inside && line.rfind("VmFlags:", 0) == 0) {
      return line + " ";
    }
  }
  return "";
}

std::vector<uint8_t> sealed_with(SealingKey& key) {
  Header header;
  std::vector<uint8_t> out(kRecordOverhead);
  seal_record(key, Context{}, header, nullptr, out.data());
  return out;
}

}  // namespace

// threat: K21
TEST(a_child_finds_zeros_where_the_key_was) {
  const KeyBytes key = some_key();
  for (const Way way : kWays) {
    CHECK(in_child(way, [&] { return key.all_zeros() ? 1 : 0; }) == 1);
  }
  CHECK(key == some_key());
}

// threat: K18
TEST(a_child_neither_seals_nor_opens_nor_derives) {
  SealingKey sealing(some_key(), 1u << 20);
  OpeningKey opening(some_key());
  for (const Way way : kWays) {
    const int refusals = in_child(way, [&] {
      const uint8_t tag[kTagBytes] = {};
      return int(refused([&] { sealed_with(sealing); })) + int(refused([&] {
               (void)opening.open(make_nonce(0, 0), {}, nullptr, 0, tag, nullptr);
             })) +
             int(refused([&] { ratchet(sealing.bytes()); })) +
             int(refused([&] { KeyBytes(sealing.bytes()).require_key(); }));
    });
    CHECK(refusals == 4);
  }
  CHECK(!refused([&] { sealed_with(sealing); }));
}

// threat: K18
TEST(a_child_of_a_child_is_refused_and_so_is_one_that_has_keys_of_its_own) {
  SealingKey parents(some_key(), 1u << 20);
  for (const Way way : kWays) {
    const int refusals = in_child(way, [&] {
      SealingKey own(some_key(), 1u << 20);  // from here on the child has its own process mark
      if (refused([&] { sealed_with(own); })) return 50;
      const int here = refused([&] { sealed_with(parents); });
      return here + in_child(way, [&] {
               return int(refused([&] { sealed_with(parents); })) +
                      int(refused([&] { sealed_with(own); }));
             });
    });
    CHECK(refusals == 3);
  }
}

// threat: K22
TEST(a_key_of_zeros_never_seals) {
  const auto thrown = [](const std::function<void()>& call) {
    try {
      call();
    } catch (const std::logic_error&) {
      return true;
    }
    return false;
  };
  CHECK(thrown([] { SealingKey(KeyBytes(), 1u << 20); }));
  CHECK(thrown([] { OpeningKey{KeyBytes()}; }));
  CHECK(thrown([] { ratchet(KeyBytes()); }));
  SealingKey wiped(some_key(), 1u << 20);
  const_cast<KeyBytes&>(wiped.bytes()).wipe();
  CHECK(thrown([&] { sealed_with(wiped); }));
}

TEST(a_freed_key_is_overwritten_and_its_place_used_again) {
  const uint8_t* place = nullptr;
  {
    const KeyBytes key = some_key();
    place = key.data();
  }
  bool zeros = true;
  for (size_t i = 0; i < kKeyBytes; ++i) zeros &= place[i] == 0;
  CHECK(zeros);
  const size_t mapped = secret_memory_report().mapped_bytes;
  for (int i = 0; i < 100000; ++i) some_key();
  CHECK(secret_memory_report().mapped_bytes == mapped);
}

// threat: K21
TEST(core_files_leave_the_keys_out) {
  const KeyBytes key = some_key();
  const SecretBytes large(100000);
  for (const uint8_t* at : {key.data(), large.data(), large.data() + 99999}) {
    const std::string flags = flags_of(at);
    CHECK_NOTE(flags.find(" dd ") != std::string::npos, "%s", flags.c_str());
    CHECK_NOTE(flags.find(" wf ") != std::string::npos, "%s", flags.c_str());
  }
}

// Other threads seal all the time: fork() must not wait for ever, and must not leave locks taken in the
// child.
TEST(a_fork_while_other_threads_seal) {
  std::atomic<bool> enough{false};
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([&] {
      SealingKey key(some_key(), 1000);  // ratchets at almost every record
      while (!enough) sealed_with(key);
    });
  }
  int good = 0;
  for (int i = 0; i < 50; ++i) {
    good += in_child(Way::library, [] {
      SealingKey own(some_key(), 1u << 20);
      return refused([&] { sealed_with(own); }) ? 0 : 1;
    });
  }
  enough = true;
  for (std::thread& thread : threads) thread.join();
  CHECK_NOTE(good == 50, "%d of 50", good);
}

TEST(a_group_of_the_parents) {
  Engine engine(0, 1, Context{}, some_key(), 4096, 1u << 20);
  Mailbox mailbox(0, 1, Context{}, 4096, 1u << 20);
  const Call call{};
  const auto collective = engine.submit(call, std::nullopt);
  uint8_t byte = 0;
  const Message receives{false, Message::kAnyone, 0, &byte, 1, 1};
  const auto message = mailbox.submit(receives);
  for (const Way way : kWays) {
    const int refusals = in_child(way, [&] {
      engine.close();  // does nothing, and says nothing to the peers
      mailbox.close();
      engine.fail(Failure(FailureCode::closed, -1, "no"));
      mailbox.fail(Failure(FailureCode::closed, -1, "no"));
      return int(refused([&] { engine.run(call); })) + int(refused([&] { engine.account(); })) +
             int(refused([&] { engine.submit(call, std::nullopt); })) +
             int(refused([&] { engine.release_streams(*collective); })) +
             int(refused([&] { collective->wait_on_host({}); })) +
             int(refused([&] { mailbox.submit(receives); })) +
             int(refused([&] { message->wait_on_host({}); })) +
             int(refused([&] { mailbox.finished(); })) + int(refused([&] { mailbox.stats(); }));
    });
    CHECK_NOTE(refusals == 9, "%d of 9", refusals);
  }
  CHECK(!refused([&] { engine.account(); }));
}

// glibc's setting applies to the whole process, so other threads allocate while it changes.
TEST(memory_that_must_be_zero_is_zero_while_freed_memory_is_overwritten) {
  std::atomic<bool> ended{false};
  std::thread other([&] {
    while (!ended) const FreedMemoryOverwritten overwritten;
  });
  constexpr size_t kBytes = 1 << 20;
#ifdef M_MMAP_THRESHOLD
  ::mallopt(M_MMAP_THRESHOLD, kBytes / 2);  // each block is newly mapped, and assumed to be zero
#endif
  int wrong = 0;
  for (int turn = 0; turn < 3000; ++turn) {
    auto* const memory = static_cast<uint8_t*>(std::calloc(kBytes, 1));
    for (size_t at = 0; at < kBytes; at += 4096) wrong += memory[at] != 0;
    std::free(memory);
  }
  ended = true;
  other.join();
  CHECK(wrong == 0);
}

int main(int argc, char** argv) { return testing::run(argc, argv); }
