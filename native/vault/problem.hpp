// The reasons why a sealed file was not written or not read.
#pragma once

#include <stdexcept>
#include <string>

namespace sealring {

enum class FileProblem {
  truncated,    // no sealed file has this length, or it became shorter while it was read
  wrong_key,  // the commitment does not fit this key and context
  tampered,     // a chunk's tag does not match
  too_long,  // more chunks than the format allows
  out_of_range,  // the caller asked for bytes after the end
  closed  // the caller has closed the file
};

struct SealedFileError : std::runtime_error {
  SealedFileError(FileProblem what, const std::string& text)
      : std::runtime_error(text), problem(what) {}
  FileProblem problem;
};

}  // namespace sealring
