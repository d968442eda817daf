// A test runner small enough to read: TEST(name) { CHECK(condition); } and a main that calls run().
//
// A failed CHECK prints its place and lets the test go on. CHECK_NOTE adds a printf-style note on the values
// at hand. An argument that does not begin with "--" selects the tests whose names contain it.

#pragma once

#include <cstdio>
#include <cstring>
#include <exception>
#include <vector>

namespace sealring::testing {

struct Test {
  const char* name;
  void (*body)();
};

inline std::vector<Test>& all_tests() {
  static std::vector<Test> tests;
  return tests;
}

inline long& failed_checks() {
  static long count = 0;
  return count;
}

struct Register {
  Register(const char* name, void (*body)()) { all_tests().push_back({name, body}); }
};

// Counts the failure. Returns true while this test has few enough failures for them to be printed.
inline bool fail(const char* file, int line, const char* what) {
  constexpr long kShown = 5;
  if (++failed_checks() > kShown) return false;
  std::printf("  %s:%d: CHECK(%s) failed\n", file, line, what);
  return true;
}

inline bool chosen(const char* name, int argc, char** argv) {
  bool any_filter = false;
  for (int i = 1; i < argc; ++i) {
    if (std::strncmp(argv[i], "--", 2) == 0) continue;
    if (std::strstr(name, argv[i]) != nullptr) return true;
    any_filter = true;
  }
  return !any_filter;
}

// Runs the chosen tests, prints "N passed, M failed", and returns the exit status. It is a failure if no test
// was chosen: a misspelt filter must not look like success.
inline int run(int argc, char** argv) {
  int passed = 0;
  int failed = 0;
  for (const Test& test : all_tests()) {
    if (!chosen(test.name, argc, argv)) continue;
    failed_checks() = 0;
    try {
      test.body();
    } catch (const std::exception& error) {
      ++failed_checks();
      std::printf("  threw: %s\n", error.what());
    } catch (...) {
      ++failed_checks();
      std::printf("  threw something that is no std::exception\n");
    }
    const bool ok = failed_checks() == 0;
    ++(ok ? passed : failed);
    std::printf("%s %s\n", ok ? "ok  " : "FAIL", test.name);
  }
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed == 0 && passed > 0 ? 0 : 1;
}

}  // namespace sealring::testing

#define TEST(name)                                                                \
  static void test_##name();                                                      \
  static const ::sealring::testing::Register register_##name(#name, test_##name); \
  static void test_##name()

#define CHECK(...)                                                                   \
  do {                                                                               \
    if (!(__VA_ARGS__)) ::sealring::testing::fail(__FILE__, __LINE__, #__VA_ARGS__); \
  } while (false)

#define CHECK_NOTE(condition, ...)                                                   \
  do {                                                                               \
    if (!(condition) && ::sealring::testing::fail(__FILE__, __LINE__, #condition)) { \
      std::printf("    ");                                                           \
      std::printf(__VA_ARGS__);                                                      \
      std::printf("\n");                                                             \
    }                                                                                \
  } while (false)

#define CHECK_THROWS(Type, expression)                                             \
  do {                                                                             \
    bool caught = false;                                                           \
    try {                                                                          \
      static_cast<void>(expression);                                               \
    } catch (const Type&) {                                                        \
      caught = true;                                                               \
    }                                                                              \
    if (!caught) {                                                                 \
      ::sealring::testing::fail(__FILE__, __LINE__, #expression " throws " #Type); \
    }                                                                              \
  } while (false)
