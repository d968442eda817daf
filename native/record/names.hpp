// How failures' texts name ranks and codes.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "record/view.hpp"

namespace sealring {

struct Names {
  std::vector<int>
      members;  // the ranks' numbers in the job; if empty, ranks keep their numbers in the group
  std::map<uint8_t, std::string> operations;
  std::map<uint8_t, std::string> algorithms;
  std::set<uint8_t> rooted;                // operations in which one rank is the root
  std::map<uint8_t, std::string> remarks;  // by operation: what is added to a text that names it

  // Such as "rank 5". A number that is no rank of the group is shown as it is.
  std::string rank(int64_t rank) const;
  // Such as "collective 7 (all_reduce sum of 96 bytes of float32, ring)".
  std::string view(const View& view) const;
  // The remark on the first of these operations that has one, or nothing.
  std::string remark(std::initializer_list<uint8_t> operations) const;
};

}  // namespace sealring
