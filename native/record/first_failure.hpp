// A group has one failure: the first that ended it, whichever of its halves saw it.
//
// Collectives and messages have links of their own, and may see one fault at the same moment, each
// in its own way. The second half takes over the first one's failure, for the alert as for the
// exception: so the other ranks hear from this rank what its own script hears.
#pragma once

#include <mutex>
#include <optional>

#include "record/failure.hpp"

namespace sealring {

class FirstFailure {
 public:
  // The failure to end with: this one if it is the first or says the same, else the first.
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
