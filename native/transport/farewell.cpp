#include "transport/farewell.hpp"

#include <poll.h>

#include <algorithm>
#include <chrono>

namespace sealring {
namespace {

// How long a leaving rank tries to deliver its last record.
constexpr std::chrono::milliseconds kLastWords{2000};
// How long a rank listens to what the others were doing, after ranks disagreed.
constexpr std::chrono::milliseconds kViews{1000};

}  // namespace

std::vector<Link*> links_in(const Links& links) {
  std::vector<Link*> found;
  for (const auto& link : links) {
    if (link) found.push_back(link.get());
  }
  return found;
}

void send_last_records(Links& links, Kind kind, std::span<const uint8_t> payload,
                       const View& view) {
  send_last_records(links_in(links), kind, payload, view);
}

void send_last_records(const std::vector<Link*>& links, Kind kind, std::span<const uint8_t> payload,
                       const View& view) {
  for (Link* link : links) {
    Header header;
    view.put_into(header);
    header.kind = kind;
    header.length = static_cast<uint32_t>(payload.size());
    try {
      link->send(header, payload.data());
    } catch (const Failure&) {
      // The link's shared memory was corrupted; the peer will see only the end of the link.
    }
  }
  const auto deadline = std::chrono::steady_clock::now() + kLastWords;
  for (;;) {
    bool unsent = false;
    for (Link* link : links) {
      if (link->idle()) continue;
      try {
        link->flush();
      } catch (const Failure&) {
        continue;  // the peer is gone, and this rank is leaving
      }
      unsent |= !link->idle();
    }
    const auto left = deadline - std::chrono::steady_clock::now();
    if (!unsent || left.count() <= 0) break;
    // A ring has no event to wait for here; a millisecond's nap serves both kinds of pipe.
    ::poll(nullptr, 0, 1);
  }
  for (Link* link : links) link->end_writing();
  const auto delivered = [&links] {
    return std::all_of(links.begin(), links.end(), [](Link* link) { return link->delivered(); });
  };
  while (!delivered() && std::chrono::steady_clock::now() < deadline) ::poll(nullptr, 0, 1);
}

void Dismissal::say() {
  if (!late_.pipe) return;
  // Uses its own buffers, because the group's buffers belong to one thread.
  Keyring keys{rank_, context_, nullptr, {}};
  BufferPool pool(word_.payload.size());
  Link link(late_.peer, std::move(late_.pipe), late_.send_key, late_.receive_key, rekey_bytes_,
            keys, pool);
  send_last_records({&link}, word_.kind, word_.payload, {});
}

void collect_views(Links& links, const Names& names, Failure& failure) {
  const auto deadline = std::chrono::steady_clock::now() + kViews;
  std::vector<bool> heard(links.size(), false);
  for (;;) {
    bool all = true;
    for (const auto& link : links) {
      if (!link || heard[link->peer] || failure.views.contains(link->peer)) continue;
      try {
        // Records that a rank ahead of us published come before its alert, and no collective will take them.
        link->expecting = link->only_listening = true;
        link->fill();
        while (link->ready()) {
          if (link->header().kind == Kind::alert) {
            if (link->header().collective != 0) {
              failure.views[link->peer] =
                  names.rank(link->peer) + ": " + names.view(View::from(link->header()));
            }
            heard[link->peer] = true;
          }
          link->take();
          link->fill();
        }
      } catch (const Failure&) {
        heard[link->peer] = true;  // the peer is gone
      }
      all &= heard[link->peer] || link->ended();
    }
    if (all || std::chrono::steady_clock::now() > deadline) return;
    ::poll(nullptr, 0, 1);
  }
}

}  // namespace sealring
