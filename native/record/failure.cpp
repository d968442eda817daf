#include "record/failure.hpp"

#include <cstdio>

namespace sealring {
namespace {

constexpr const char* kMismatch = "Detected mismatch between collectives on ranks: ";

std::string formatted(const char* format, double value) {
  char text[64];
  std::snprintf(text, sizeof text, format, value);
  return text;
}

}  // namespace

std::string Failure::text() const {
  std::string text = what();
  if (code == FailureCode::out_of_step && !views.empty() && !text.starts_with(kMismatch)) {
    text = kMismatch + text;
  }
  for (const auto& [rank, view] : views) text += "\n  " + view;
  return text;
}

Failure peer_was_silent(int peer, const std::string& what, double seconds) {
  return Failure(FailureCode::peer_silent, peer,
                 "Timed out waiting " + formatted("%.0f", seconds * 1e3) + "ms: " + what + " for " +
                     formatted("%g", seconds) + " s");
}

Failure peer_closed(int peer, const std::string& what) {
  return Failure(FailureCode::peer_lost, peer, "Connection closed by peer: " + what);
}

Failure ranks_disagree(int peer, const std::string& what) {
  return Failure(FailureCode::out_of_step, peer, kMismatch + what);
}

}  // namespace sealring
