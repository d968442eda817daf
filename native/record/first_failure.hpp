// Makes a group have one failure: the first that ended it, whether its collectives or its messages saw it.
//
// Collectives and messages have their own links, and may see one fault at the same moment, each in its own
// way. The later one takes over the first one's failure, for the alert and for the exception. So the other
// ranks hear from this rank the same error that its own script gets.
#pragma once

#include <mutex>
#include <optional>

#include "record/failure.hpp"

namespace sealring {

class FirstFailure {
 public:
  // Returns the failure to end with: this one if it is the first or means the same, else the first.
  Failure settle(const Failure& failure) {
    const std::lock_guard<std::mutex> lock(lock_);
    if (!first_) first_ = failure;
    return failure.says_the_same_as(*first_) ? failure : *first_;
  }

 private:
  std::mutex lock_;
  std::optional<Failure> first_;
};

}  // namespace sealring
