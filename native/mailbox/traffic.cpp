// How a mailbox writes to its links and handles the records that come from them.
#include <algorithm>
#include <cstring>
#include <string>

#include "mailbox/mailbox.hpp"
#include "record/alert.hpp"

namespace sealring {
namespace {

// The most bytes of short messages from one sender that a receiver keeps before it asks for them.
constexpr size_t kUntakenBytes = 1u << 20;
// The most announcements of one sender that a receiver remembers.
constexpr size_t kAnnounced = 1024;

}  // namespace

// ---- out ---------------------------------------------------------------------------------------

bool Mailbox::write(Link& link) {
  Peer& box = peers_[link.peer];
  bool moved = false;
  while (!box.unannounced.empty() && link.has_room() &&
         box.announced.size() + box.untaken.size() < kAnnounced) {
    UnderWay next = std::move(box.unannounced.front());
    box.unannounced.pop_front();
    announce(link, std::move(next));
    moved = true;
  }
  moved |= send_data(link);
  if (!link.idle()) moved |= link.flush();
  if (link.broken()) {
    throw peer_closed(link.peer, "the peer closed the connection");
  }
  if (link.idle() && link.promised == 0) {
    for (const UnderWay& message : box.leaving) done(message.completion, link.peer);
    moved |= !box.leaving.empty();
    box.leaving.clear();
  }
  return moved;
}

// Sends one record of the first message that can move. A message whose memory is still in use does not hold
// up the others.
bool Mailbox::send_data(Link& link) {
  Peer& box = peers_[link.peer];
  for (auto next = box.accepted.begin(); next != box.accepted.end(); ++next) {
    UnderWay& message = *next;
    const bool on_device = message.ready.has_value();
    const size_t piece = piece_bytes(on_device);
    const size_t length = std::min(piece, message.bytes - message.processed);
    const bool room = on_device ? may_seal_on_device(link) : link.has_room();
    if (!room || !reached(message)) continue;
    Header header;
    header.kind = Kind::data;
    header.collective = message.id;
    header.segment = static_cast<uint32_t>(message.processed / piece);
    header.total = message.bytes;
    header.length = static_cast<uint32_t>(length);
    if (on_device) {
      seal_on_device(link, header, message);
    } else {
      link.send(header, message.memory + message.processed);
    }
    stats_.sealed_bytes += header.length;
    message.processed += header.length;
    message.moved = Clock::now();
    if (message.processed == message.bytes) {
      box.leaving.push_back(std::move(message));
      box.accepted.erase(next);
    }
    return true;
  }
  return false;
}

void Mailbox::announce(Link& link, UnderWay message) {
  Peer& box = peers_[link.peer];
  message.id = ++box.sent;
  const bool on_device = message.ready.has_value();
  const bool travels = !on_device && message.bytes <= kShortBytes &&
                       box.untaken_bytes + message.bytes <= kUntakenBytes;
  const PayloadLocation location = on_device ? PayloadLocation::on_senders_gpu
                                   : travels ? PayloadLocation::in_the_announcement
                                             : PayloadLocation::with_sender;
  Header header;
  header.kind = Kind::announce;
  header.collective = message.id;
  header.message = message.tag;
  header.total = message.bytes;
  header.length = travels ? static_cast<uint32_t>(message.bytes) : 0;
  header.segment = static_cast<uint32_t>(location);
  link.send(header, message.memory);
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
  // A link's end counts as progress only once. Otherwise the loop would never reach its check for timeouts.
  const bool moved = !link.ended() && link.fill();
  if (link.ended()) {
    const Peer& box = peers_[link.peer];
    const bool all_have_left = std::all_of(links_.begin(), links_.end(), [this](const auto& other) {
      return other ? other->ended() : &other == &links_[rank_] || !expects_late_links_;
    });
    const bool missed =
        !box.unannounced.empty() || !box.announced.empty() || !box.accepted.empty() ||
        !box.accepting.empty() ||
        std::any_of(matched_.begin(), matched_.end(),
                    [&](const Match& each) { return each.arrival.peer == link.peer; }) ||
        std::any_of(waiting_.begin(), waiting_.end(), [&](const UnderWay& each) {
          return each.peer == link.peer || (each.peer == Message::kAnyone && all_have_left);
        });
    if (missed) throw peer_closed(link.peer, "the peer left the group");
  }
  if (!link.ready()) return moved;
  switch (link.header().kind) {
    case Kind::announce:
      on_announcement(link);
      break;
    case Kind::accept:
      on_acceptance(link);
      break;
    case Kind::data:
      return take_data(link) || moved;
    case Kind::alert:
      link.open(link.arrived_payload());
      throw decode_alert({link.arrived_payload(), link.header().length}, link.peer, rank_,
                         static_cast<int>(links_.size()));
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

void Mailbox::on_announcement(Link& link) {
  const Header& header = link.header();
  link.open(link.arrived_payload());
  const PayloadLocation location = static_cast<PayloadLocation>(header.segment);
  const bool travels = location == PayloadLocation::in_the_announcement;
  if (header.collective != ++peers_[link.peer].heard ||
      location > PayloadLocation::on_senders_gpu || header.length != (travels ? header.total : 0)) {
    throw Failure(FailureCode::out_of_step, link.peer, "the peer announced a message wrongly");
  }
  Arrival arrival{link.peer, header.collective, header.message, header.total, location, {}};
  if (travels) {
    arrival.payload.assign(link.arrived_payload(), link.arrived_payload() + header.length);
    stats_.opened_bytes += header.length;
  }
  const auto waiting = std::find_if(waiting_.begin(), waiting_.end(),
                                    [&](const UnderWay& each) { return meets(each, arrival); });
  if (waiting == waiting_.end()) {
    remember(std::move(arrival));
  } else {
    match(waiting, std::move(arrival));
  }
}

// An honest peer keeps these limits by itself. The check stops any other peer from filling our memory.
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

// Compares new receives with the messages that came before them.
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

bool Mailbox::meets(const UnderWay& waiting, const Arrival& arrival) {
  return waiting.tag == arrival.tag &&
         (waiting.peer == Message::kAnyone || waiting.peer == arrival.peer);
}

// Called when a receive and its message were found.
void Mailbox::match(std::list<UnderWay>::iterator waiting, Arrival arrival) {
  UnderWay incoming = *waiting;
  waiting_.erase(waiting);
  require_same_place(incoming, arrival);
  if (incoming.bytes != arrival.bytes) {
    throw Failure(FailureCode::out_of_step, arrival.peer,
                  names().rank(arrival.peer) + " sent a message of " +
                      std::to_string(arrival.bytes) + " bytes with tag " +
                      std::to_string(arrival.tag) + ", " + names().rank(rank_) + " receives " +
                      std::to_string(incoming.bytes));
  }
  incoming.moved = Clock::now();
  matched_.push_back({incoming, std::move(arrival)});
  accept_matched();
}

bool Mailbox::accept_matched() {
  bool moved = false;
  for (auto each = matched_.begin(); each != matched_.end();) {
    if (!reached(each->incoming)) {
      ++each;
      continue;
    }
    accept(each->incoming, each->arrival);
    each = matched_.erase(each);
    moved = true;
  }
  return moved;
}

// Tells the sender that the message is accepted. A short message is here already; the payload of any other
// comes now.
void Mailbox::accept(UnderWay incoming, const Arrival& arrival) {
  Header header;
  header.kind = Kind::accept;
  header.collective = arrival.id;
  links_[arrival.peer]->send(header, nullptr);
  incoming.moved = Clock::now();
  if (arrival.location != PayloadLocation::in_the_announcement) {
    peers_[arrival.peer].accepting.emplace(arrival.id, incoming);
    return;
  }
  if (arrival.bytes != 0) std::memcpy(incoming.memory, arrival.payload.data(), arrival.bytes);
  done(incoming.completion, arrival.peer);
}

void Mailbox::on_acceptance(Link& link) {
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

// Takes the record, unless the device has no room for it yet.
bool Mailbox::take_data(Link& link) {
  const Header& header = link.header();
  Peer& box = peers_[link.peer];
  const auto found = box.accepting.find(header.collective);
  const auto is_next = [&](const UnderWay& incoming) {
    const bool on_device = incoming.ready.has_value();
    const size_t piece = piece_bytes(on_device);
    return header.lane == (on_device ? kGpuLane : kCpuLane) &&
           header.segment * piece == incoming.processed && header.total == incoming.bytes &&
           header.length == std::min(piece, incoming.bytes - incoming.processed);
  };
  if (found == box.accepting.end() || !is_next(found->second)) {
    throw Failure(FailureCode::out_of_step, link.peer, "the peer sent what was not asked for");
  }
  UnderWay& incoming = found->second;
  const size_t length = header.length;
  const bool last = incoming.processed + length == incoming.bytes;
  if (incoming.ready) {
    if (!device_->has_room()) return false;
    open_on_device(link, incoming, last);
  } else {
    // Opened and checked in private memory, before the user sees any of it.
    link.open(link.arrived_payload());
    std::memcpy(incoming.memory + incoming.processed, link.arrived_payload(), length);
    link.take();
  }
  stats_.opened_bytes += length;
  incoming.processed += length;
  incoming.moved = Clock::now();
  if (last) {
    // A message that the device opens is done when settle() says so.
    if (!incoming.ready) done(incoming.completion, link.peer);
    box.accepting.erase(found);
  }
  return true;
}

}  // namespace sealring
