// The watch over a driver: it speaks up when a probe does not come back, and only then.

#include <condition_variable>
#include <mutex>

#include "../driver_watch.hpp"
#include "check.hpp"

using namespace sealring;

namespace {

class Flag {
 public:
  void raise() {
    const std::lock_guard<std::mutex> lock(lock_);
    raised_ = true;
    changed_.notify_all();
  }
  void wait() {
    std::unique_lock<std::mutex> lock(lock_);
    changed_.wait(lock, [&] { return raised_; });
  }
  bool raised() {
    const std::lock_guard<std::mutex> lock(lock_);
    return raised_;
  }

 private:
  std::mutex lock_;
  std::condition_variable changed_;
  bool raised_ = false;
};

// A watch never ends, nor what it refers to.
template <typename Thing>
Thing& for_ever() {
  return *new Thing();
}

}  // namespace

TEST(a_probe_that_does_not_come_back_is_noticed) {
  Flag& noticed = for_ever<Flag>();
  Flag& never = for_ever<Flag>();
  (new DriverWatch([] { return true; }, [&] { never.wait(); }, [&] { noticed.raise(); }))
      ->expect_within(0.01);
  noticed.wait();
  CHECK(!never.raised());
}

TEST(probes_that_come_back_are_repeated_and_nobody_is_told) {
  Flag& noticed = for_ever<Flag>();
  Flag& twice = for_ever<Flag>();
  auto& probes = for_ever<int>();
  (new DriverWatch([] { return true; },
                   [&] {
                     if (++probes == 2) twice.raise();
                   },
                   [&] { noticed.raise(); }))
      ->expect_within(60);
  twice.wait();
  CHECK(!noticed.raised());
}

TEST(nothing_is_probed_where_nobody_waits) {
  Flag& probed = for_ever<Flag>();
  Flag& asked_twice = for_ever<Flag>();
  auto& asked = for_ever<int>();
  (new DriverWatch(
       [&] {
         if (++asked == 2) asked_twice.raise();
         return false;
       },
       [&] { probed.raise(); }, [] {}))
      ->expect_within(60);
  asked_twice.wait();
  CHECK(!probed.raised());
}

int main(int argc, char** argv) { return testing::run(argc, argv); }
