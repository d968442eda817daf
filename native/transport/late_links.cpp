#include "transport/late_links.hpp"

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <system_error>
#include <utility>

namespace sealring {

LateLinks::LateLinks() : wake_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  if (wake_ < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
}

LateLinks::~LateLinks() { ::close(wake_); }

void LateLinks::ring() const {
  const uint64_t one = 1;
  (void)!::write(wake_, &one, sizeof one);
}

void LateLinks::hear() const {
  uint64_t rung = 0;
  (void)!::read(wake_, &rung, sizeof rung);
}

std::optional<LastWord> LateLinks::add(LateLink& link) {
  const std::lock_guard<std::mutex> lock(lock_);
  if (closed_) return closed_;
  links_.push_back(std::move(link));
  waiting_ = true;
  ring();
  return std::nullopt;
}

std::vector<LateLink> LateLinks::take() {
  const std::lock_guard<std::mutex> lock(lock_);
  hear();
  waiting_ = false;
  return std::exchange(links_, {});
}

std::vector<LateLink> LateLinks::close(LastWord word) {
  const std::lock_guard<std::mutex> lock(lock_);
  closed_ = std::move(word);
  waiting_ = false;
  return std::exchange(links_, {});
}

}  // namespace sealring
