// The last records of a group: an alert or a bye.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "record/view.hpp"
#include "transport/late_links.hpp"
#include "transport/link.hpp"

namespace sealring {

using Links = std::vector<std::unique_ptr<Link>>;  // by rank; empty for our own

// Sends an alert or a bye to every peer, with this rank's View, and waits a short time for it to be
// delivered.
void send_last_records(const std::vector<Link*>& links, Kind kind, std::span<const uint8_t> payload,
                       const View& view);
void send_last_records(Links& links, Kind kind, std::span<const uint8_t> payload, const View& view);

// A link that came after its group's end. Its peer must still be told how the group ended.
class Dismissal {
 public:
  Dismissal(int rank, const Context& context, uint64_t rekey_bytes, LateLink late, LastWord word)
      : rank_(rank),
        context_(context),
        rekey_bytes_(rekey_bytes),
        late_(std::move(late)),
        word_(std::move(word)) {}
  // Tells the peer and closes the link. Takes seconds if the peer reads nothing. Any thread may call it,
  // once.
  void say();

 private:
  const int rank_;
  const Context context_;
  const uint64_t rekey_bytes_;
  LateLink late_;
  const LastWord word_;
};

// The links that exist.
std::vector<Link*> links_in(const Links& links);

// Called after ranks disagreed: collects from the other ranks' alerts what they were doing. A rank that is in
// no collective does not answer, so this waits at most a second.
void collect_views(Links& links, const Names& names, Failure& failure);

}  // namespace sealring
