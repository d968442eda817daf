// Why a sealed file was not written or not read.
#pragma once

#include <stdexcept>
#include <string>

namespace sealring {

enum class FileProblem {
  truncated,    // no sealed file has this length, or it became shorter while it was read
  wrong_key,    // the commitment is not that of this key and this context
  tampered,     // a chunk's tag does not match
  too_long,     // more chunks than the format has numbers for
  out_of_range,  // the caller asked for bytes behind the end
  closed        // the caller closed it before
};

struct SealedFileError : std::runtime_error {
  SealedFileError(FileProblem what, const std::string& text)
      : std::runtime_error(text), problem(what) {}
  FileProblem problem;
};

}  // namespace sealring
