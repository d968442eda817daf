// What a mailbox writes to its links, and what it makes of what comes from them.
#include <algorithm>
#include <cstring>
#include <string>

#include "alert.hpp"
#include "mailbox.hpp"

namespace sealring {
namespace {

// Short messages that a receiver may have to keep for one sender before it asks for them.
constexpr size_t kUntakenBytes = 1u << 20;
// Announcements that one receiver may have to remember.
constexpr size_t kAnnounced = 1024;

}  // namespace

// ---- out ---------------------------------------------------------------------------------------

bool Mailbox::write(Link& link) {
  Peer& box = peers_[link.peer];
  bool moved = false;
  while (!box.unannounced.empty() && link.has_room() &&
         box.announced.size() + box.untaken.size() < kAnnounced) {
    Outgoing next = std::move(box.unannounced.front());
    box.unannounced.pop_front();
    announce(link, std::move(next));
    moved = true;
  }
  if (!box.accepted.empty() && link.has_room()) {
    Outgoing& message = box.accepted.front();
    Header header;
    header.kind = Kind::data;
    header.collective = message.id;
    header.segment = static_cast<uint32_t>(message.sealed / pool_.payload_bytes());
    header.total = message.bytes;
    header.length =
        static_cast<uint32_t>(std::min(pool_.payload_bytes(), message.bytes - message.sealed));
    link.send(header, message.from + message.sealed);
    stats_.sealed_bytes += header.length;
    message.sealed += header.length;
    message.moved = Clock::now();
    if (message.sealed == message.bytes) {
      box.leaving.push_back(std::move(message));
      box.accepted.pop_front();
    }
    moved = true;
  }
  if (!link.idle()) moved |= link.flush();
  if (link.broken()) {
    throw Failure(FailureCode::peer_lost, link.peer, "the peer closed the connection");
  }
  if (link.idle()) {
    for (const Outgoing& message : box.leaving) done(message.ticket, link.peer);
    moved |= !box.leaving.empty();
    box.leaving.clear();
  }
  return moved;
}

void Mailbox::announce(Link& link, Outgoing message) {
  Peer& box = peers_[link.peer];
  message.id = ++box.sent;
  const bool travels =
      message.bytes <= kShortBytes && box.untaken_bytes + message.bytes <= kUntakenBytes;
  Header header;
  header.kind = Kind::announce;
  header.collective = message.id;
  header.message = message.tag;
  header.total = message.bytes;
  header.length = travels ? static_cast<uint32_t>(message.bytes) : 0;
  header.segment = travels ? 1 : 0;
  link.send(header, message.from);
  message.moved = Clock::now();
  if (travels) {
    stats_.sealed_bytes += message.bytes;
    box.untaken[message.id] = message.bytes;
    box.untaken_bytes += message.bytes;
    box.leaving.push_back(std::move(message));
  } else {
    const uint64_t id = message.id;
    box.announced.emplace(id, std::move(message));
  }
}

// ---- in ----------------------------------------------------------------------------------------

bool Mailbox::read(Link& link) {
  // An end is news once: who took it for progress each time would never look at the clock.
  const bool moved = !link.ended() && link.fill();
  if (link.ended()) {
    const Peer& box = peers_[link.peer];
    const bool nobody_is_left =
        std::all_of(links_.begin(), links_.end(),
                    [](const auto& other) { return !other || other->ended(); });
    const bool missed = !box.unannounced.empty() || !box.announced.empty() ||
                        !box.accepted.empty() || !box.accepting.empty() ||
                        std::any_of(waiting_.begin(), waiting_.end(), [&](const Incoming& each) {
                          return each.peer == link.peer ||
                                 (each.peer == kAnyone && nobody_is_left);
                        });
    if (missed) throw Failure(FailureCode::peer_lost, link.peer, "the peer left the group");
  }
  if (!link.ready()) return moved;
  switch (link.header().kind) {
    case Kind::announce:
      hear_announcement(link);
      break;
    case Kind::accept:
      hear_acceptance(link);
      break;
    case Kind::data:
      take_data(link);
      break;
    case Kind::alert:
      link.open(link.arrived_payload());
      throw decode_alert({link.arrived_payload(), link.header().length}, link.peer);
    case Kind::bye:
      link.open(link.arrived_payload());
      link.said_bye = true;
      break;
    case Kind::pair:
    case Kind::group:
    case Kind::status:
    case Kind::fetched:
      throw Failure(FailureCode::tampered, link.peer, "a collective came over a messages' link");
  }
  link.take();
  return true;
}

void Mailbox::hear_announcement(Link& link) {
  const Header& header = link.header();
  link.open(link.arrived_payload());
  const bool travels = header.segment != 0;
  if (header.collective != ++peers_[link.peer].heard ||
      (travels && header.length != header.total) || (!travels && header.length != 0)) {
    throw Failure(FailureCode::out_of_step, link.peer, "the peer announced a message wrongly");
  }
  Arrival arrival{link.peer, header.collective, header.message, header.total, {}};
  if (travels) {
    arrival.payload.assign(link.arrived_payload(), link.arrived_payload() + header.length);
    stats_.opened_bytes += header.length;
  }
  const auto waiting = std::find_if(waiting_.begin(), waiting_.end(), [&](const Incoming& each) {
    return meets(each, arrival);
  });
  if (waiting == waiting_.end()) {
    remember(std::move(arrival));
  } else {
    match(waiting, std::move(arrival));
  }
}

// A peer keeps these limits by itself; one that does not shall not fill our memory.
void Mailbox::remember(Arrival arrival) {
  size_t held = 1;
  size_t bytes = arrival.payload.size();
  for (const Arrival& each : arrivals_) {
    if (each.peer != arrival.peer) continue;
    ++held;
    bytes += each.payload.size();
  }
  if (held > kAnnounced || bytes > kUntakenBytes) {
    throw Failure(FailureCode::out_of_step, arrival.peer, "the peer announced too many messages");
  }
  arrivals_.push_back(std::move(arrival));
}

// What came before it was asked for.
void Mailbox::match_arrivals() {
  if (!std::exchange(new_receives_, false)) return;
  for (auto waiting = waiting_.begin(); waiting != waiting_.end();) {
    const auto next = std::next(waiting);
    const auto here = std::find_if(arrivals_.begin(), arrivals_.end(), [&](const Arrival& arrival) {
      return meets(*waiting, arrival);
    });
    if (here != arrivals_.end()) {
      Arrival arrival = std::move(*here);
      arrivals_.erase(here);
      match(waiting, std::move(arrival));
    }
    waiting = next;
  }
}

bool Mailbox::meets(const Incoming& waiting, const Arrival& arrival) {
  return waiting.tag == arrival.tag && (waiting.peer == kAnyone || waiting.peer == arrival.peer);
}

// A receive has met its message: a short one is here already, a longer one is asked for.
void Mailbox::match(std::list<Incoming>::iterator waiting, Arrival arrival) {
  Incoming incoming = *waiting;
  waiting_.erase(waiting);
  if (incoming.bytes != arrival.bytes) {
    throw Failure(FailureCode::out_of_step, arrival.peer,
                  "rank " + std::to_string(arrival.peer) + " sent a message of " +
                      std::to_string(arrival.bytes) + " bytes with tag " +
                      std::to_string(arrival.tag) + ", rank " + std::to_string(rank_) +
                      " receives " + std::to_string(incoming.bytes));
  }
  Link& link = *links_[arrival.peer];
  Header header;
  header.kind = Kind::accept;
  header.collective = arrival.id;
  link.send(header, nullptr);
  incoming.moved = Clock::now();
  // A message of no bytes always travels with its announcement.
  if (arrival.bytes != 0 && arrival.payload.empty()) {
    peers_[arrival.peer].accepting.emplace(arrival.id, incoming);
    return;
  }
  if (arrival.bytes != 0) std::memcpy(incoming.into, arrival.payload.data(), arrival.bytes);
  done(incoming.ticket, arrival.peer);
}

void Mailbox::hear_acceptance(Link& link) {
  link.open(link.arrived_payload());
  Peer& box = peers_[link.peer];
  const uint64_t id = link.header().collective;
  if (const auto taken = box.untaken.find(id); taken != box.untaken.end()) {
    box.untaken_bytes -= taken->second;
    box.untaken.erase(taken);
    return;
  }
  const auto found = box.announced.find(id);
  if (found == box.announced.end()) {
    throw Failure(FailureCode::out_of_step, link.peer, "the peer accepted what was not sent");
  }
  found->second.moved = Clock::now();
  box.accepted.push_back(std::move(found->second));
  box.announced.erase(found);
}

void Mailbox::take_data(Link& link) {
  const Header& header = link.header();
  Peer& box = peers_[link.peer];
  const auto found = box.accepting.find(header.collective);
  if (found == box.accepting.end() || header.segment * pool_.payload_bytes() != found->second.have ||
      header.total != found->second.bytes || header.length == 0 ||
      header.length > found->second.bytes - found->second.have) {
    throw Failure(FailureCode::out_of_step, link.peer, "the peer sent what was not asked for");
  }
  // Opened and checked in private memory, before the user sees any of it.
  link.open(link.arrived_payload());
  Incoming& incoming = found->second;
  std::memcpy(incoming.into + incoming.have, link.arrived_payload(), header.length);
  stats_.opened_bytes += header.length;
  incoming.have += header.length;
  incoming.moved = Clock::now();
  if (incoming.have == incoming.bytes) {
    done(incoming.ticket, link.peer);
    box.accepting.erase(found);
  }
}

}  // namespace sealring
