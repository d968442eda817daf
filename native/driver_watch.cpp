#include "driver_watch.hpp"

#include <algorithm>
#include <thread>

namespace sealring {
namespace {

constexpr double kPauseS = 0.5;  // between two probes, and between two looks

void pause(double seconds) { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); }

}  // namespace

DriverWatch::DriverWatch(std::function<bool()> needed, std::function<void()> probe,
                         std::function<void()> gave_up)
    : needed_(std::move(needed)), probe_(std::move(probe)), gave_up_(std::move(gave_up)) {
  std::thread(&DriverWatch::keep_probing, this).detach();
  std::thread(&DriverWatch::keep_watching, this).detach();
}

void DriverWatch::expect_within(double seconds) {
  const std::lock_guard<std::mutex> lock(lock_);
  patience_s_ = patience_s_ == 0 ? seconds : std::min(patience_s_, seconds);
}

void DriverWatch::keep_probing() {
  for (;; pause(kPauseS)) {
    if (!needed_()) continue;
    {
      const std::lock_guard<std::mutex> lock(lock_);
      probing_ = true;
      since_ = Clock::now();
    }
    probe_();
    const std::lock_guard<std::mutex> lock(lock_);
    probing_ = false;
  }
}

void DriverWatch::keep_watching() {
  while (!overdue()) pause(kPauseS);
  gave_up_();
}

bool DriverWatch::overdue() {
  const std::lock_guard<std::mutex> lock(lock_);
  if (!probing_ || patience_s_ == 0) return false;
  return std::chrono::duration<double>(Clock::now() - since_).count() > patience_s_;
}

}  // namespace sealring
