// Which collective a rank says it is in, and how it was called.
#pragma once

#include <cstdint>

#include "record/record.hpp"

namespace sealring {

struct View {
  uint64_t number = 0;  // 0: no collective
  uint8_t operation = 0;
  uint8_t algorithm = 0;
  uint8_t dtype = 0;
  uint8_t reduction = 0;
  uint32_t root = 0;
  uint64_t total = 0;

  bool operator==(const View&) const = default;

  static View from(const Header& header) {
    return {header.collective, header.operation, header.algorithm, header.dtype,
            header.reduction,  header.root,      header.total};
  }
  void put_into(Header& header) const {
    header.collective = number;
    header.operation = operation;
    header.algorithm = algorithm;
    header.dtype = dtype;
    header.reduction = reduction;
    header.root = root;
    header.total = total;
  }
};

}  // namespace sealring
