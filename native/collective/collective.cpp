#include "collective/collective.hpp"

#include <algorithm>
#include <cstring>
#include <string>

#include "collective/stopwatch.hpp"
#include "record/alert.hpp"

namespace sealring {
namespace {

// While records move, the lease is checked only once in this many rounds.
constexpr unsigned kRoundsPerLook = 64;

}  // namespace

Collective::Collective(const Call& call, Links& links, Keyring& keyring, BufferPool& pool,
                       Device* device, Wires* wires, Stats& stats, Backoff& patience,
                       const History& history, const std::atomic<bool>& interrupted,
                       const Lease* lease, const Latecomers& latecomers)
    : call_(call),
      program_(*call.program),
      cut_(call, wires),
      links_(links),
      keyring_(keyring),
      pool_(pool),
      device_(device),
      wires_(wires),
      stats_(stats),
      backoff_(patience),
      history_(history),
      interrupted_(interrupted),
      latecomers_(latecomers),
      lease_(lease),
      reduce_(reduce_function(call.dtype, call.reduction)),
      records_per_segment_(device == nullptr ? 1 : records_in_run(call.segment_bytes)),
      expected_(links.size(), 0) {
  for (size_t step = 0; step < program_.steps.size(); ++step) {
    const Step& each = program_.steps[step];
    if (receives(each.action)) expected_[each.peers[0]] += cut_.segments_of(static_cast<int>(step));
    if (call.lane != 0 && cut_.segments_of(static_cast<int>(step)) != 0)
      in_this_lane_.insert(each.peers.begin(), each.peers.end());
    if (!receives(each.action) && !each.peers.empty() && way_to(each.peers[0]) == Wires::Way::area)
      area_readers_.insert(each.peers.begin(), each.peers.end());
  }
  if (number_of(cut_.position(cut_.segments)) > UINT32_MAX)
    throw std::invalid_argument("more segments than a record can number");
  window_.resize(cut_.window);
  stats.scratch_bytes = std::max<uint64_t>(stats.scratch_bytes, cut_.scratch_bytes());
  if (device != nullptr) {
    device->begin({call.ready, call.dtype, call.reduction, static_cast<uint32_t>(program_.world),
                   call.factor, call.segment_bytes, cut_.scratch_bytes(), call.submitted});
  }
  if (wires != nullptr && wires->exchanges()) exchanging_.emplace(cut_, *wires);
  for (int peer : program_.sources) {
    if (links_[peer]) links_[peer]->expecting = true;
  }
}

Collective::~Collective() {
  // From here on the owner may use the memory again, so the device must no longer write to it.
  if (device_ != nullptr && !device_idle_) device_->abandon();
  for (int peer : program_.sources) {
    if (links_[peer]) links_[peer]->expecting = false;
  }
}

void Collective::run() {
  const Stopwatch running(stats_.run_ns);
  check_interrupt();
  backoff_.progressed();
  open_segments();
  for (;;) {
    // Each round runs one task, sends, and takes one record per link, so that every link moves in both
    // directions.
    bool moved = latecomers_.links.waiting() && take_latecomers();
    moved |= run_tasks();
    moved |= flush_all();
    moved |= receive_all();
    if (device_ != nullptr) moved |= settle();
    if (exchanging_) {
      moved |= exchanging_->advance(*device_);
      moved |= open_arrived();
    }
    // While a peer may still fetch from our memory, the memory must not be overwritten or returned to its
    // owner.
    const bool kept =
        wires_ != nullptr && (wires_->lends() || (exchanging_ && !exchanging_->complete()));
    if (finished_ == cut_.segments && on_device_.empty() && !kept && !flush_all()) {
      const bool sent = std::all_of(links_.begin(), links_.end(), [](const auto& link) {
        return !link || (link->idle() && !link->broken());
      });
      if (sent) {
        if (device_ != nullptr) device_->end();
        device_idle_ = true;
        return;
      }
    }
    if (moved) {
      backoff_.progressed();
      if (++rounds_ % kRoundsPerLook == 0) require_lease();
    } else {
      wait();
    }
  }
}

// ---- segments and steps ------------------------------------------------------------------------

void Collective::open_segments() {
  while (opened_ < cut_.segments && opened_ < oldest_ + window_.size()) {
    Segment& segment = window_[opened_ % window_.size()];
    segment.number = opened_++;
    segment.position = cut_.position(segment.number);
    segment.waits = program_.waits;
    segment.done.assign(program_.steps.size(), false);
    segment.left = program_.steps.size();
    if (device_ == nullptr) segment.scratch.resize(program_.scratch.size() * call_.segment_bytes);
    if (segment.left == 0) {  // a program without steps
      ++finished_;
      oldest_ = opened_;
      continue;
    }
    // A step does not exist in segments after the end of its slot, so no other step waits for it there.
    for (size_t step = 0; segment.number >= cut_.full_segments && step < program_.steps.size();
         ++step) {
      if (segment.number < cut_.segments_of(static_cast<int>(step))) continue;
      segment.done[step] = true;
      --segment.left;
      for (int next : program_.successors[step]) --segment.waits[next];
    }
    for (size_t step = 0; step < program_.steps.size(); ++step) {
      if (segment.waits[step] == 0 && !segment.done[step]) enable(segment, static_cast<int>(step));
    }
  }
}

// Queues a step as a task. A receive runs when its record comes, a forward together with its receive.
void Collective::enable(Segment& segment, int step) {
  const Action action = program_.steps[step].action;
  if (!receives(action) && action != Action::forward) tasks_.push_back({&segment, step});
}

void Collective::finish(Segment& segment, int step) {
  segment.done[step] = true;
  for (int next : program_.successors[step]) {
    if (--segment.waits[next] == 0 && !segment.done[next]) enable(segment, next);
  }
  if (--segment.left != 0) return;
  ++finished_;
  while (oldest_ < opened_ && window_[oldest_ % window_.size()].left == 0) ++oldest_;
  open_segments();
}

uint8_t* Collective::at(Segment& segment, int slot) const {
  if (slot >= program_.slots) {
    uint8_t* const scratch =
        device_ == nullptr ? segment.scratch.data()
                           : device_->scratch() + segment.number % window_.size() *
                                                      program_.scratch.size() * call_.segment_bytes;
    return scratch + static_cast<size_t>(slot - program_.slots) * call_.segment_bytes;
  }
  return call_.slots[slot].data + segment.position * call_.segment_bytes;
}

size_t Collective::length(const Segment& segment, int slot) const {
  return cut_.segment_length(segment.position, slot);
}

uint64_t Collective::total_of(int slot) const {
  return call_.total.value_or(cut_.slot_bytes(slot));
}

// ---- what this rank does by itself -------------------------------------------------------------

// Runs the first task that can run. A send whose link is full waits, and later tasks for that link wait
// behind it. Otherwise room could appear between two checks and a later record could overtake an earlier one;
// it would then stay at the head of the link, unwanted until the records behind it have come.
bool Collective::run_tasks() {
  blocked_.assign(links_.size(), false);
  const auto runnable = [&](const Task& task) {
    const Step& step = program_.steps[task.step];
    // Exchanges have their own order: the order of rounds.
    if (!step.peers.empty() && exchanges_with(step.peers[0]))
      return device_has_room(*task.segment, step) &&
             exchanging_->reachable(exchanging_->round_of(task.segment->number, task.step));
    const auto has_room = [this](int peer) { return links_[peer] && links_[peer]->has_room(); };
    const bool in_turn = std::none_of(step.peers.begin(), step.peers.end(),
                                      [this](int peer) { return blocked_[peer]; });
    if (in_turn &&
        (device_ != nullptr ? device_has_room(*task.segment, step)
                            : std::all_of(step.peers.begin(), step.peers.end(), has_room))) {
      return true;
    }
    for (int peer : step.peers) blocked_[peer] = true;
    return false;
  };
  const auto found = std::find_if(tasks_.begin(), tasks_.end(), runnable);
  if (found == tasks_.end()) return false;
  const Task task = *found;
  tasks_.erase(found);
  run_task(*task.segment, task.step);
  return true;
}

void Collective::run_task(Segment& segment, int index) {
  const Step& step = program_.steps[index];
  if (step.action == Action::send || step.action == Action::publish) {
    seal(segment, index);
  } else {
    compute(segment, step);
  }
  finish(segment, index);
}

void Collective::compute(Segment& segment, const Step& step) {
  const Stopwatch reducing(stats_.reduce_ns);
  if (device_ != nullptr) return compute_on_device(segment, step);
  const size_t bytes = length(segment, step.slot);
  switch (step.action) {
    case Action::copy:
      if (bytes != 0 && at(segment, step.slot) != at(segment, step.source)) {
        std::memcpy(at(segment, step.slot), at(segment, step.source), bytes);
      }
      break;
    case Action::reduce:
      reduce_(at(segment, step.slot), at(segment, step.source), bytes);
      break;
    case Action::average:
      average(call_.dtype, at(segment, step.slot), bytes, static_cast<uint32_t>(program_.world));
      break;
    case Action::premultiply:
      premultiply(call_.dtype, at(segment, step.slot), bytes, call_.factor);
      break;
    case Action::send:
    case Action::publish:
    case Action::forward:
    case Action::receive:
    case Action::receive_reduce:
      break;  // no arithmetic
  }
}

Header Collective::new_header(const Segment& segment, const Step& step) const {
  Header header;
  header.length = static_cast<uint32_t>(first_length(segment, step.slot));
  header.collective = call_.number;
  header.operation = program_.operation;
  header.dtype = static_cast<uint8_t>(call_.dtype);
  header.reduction = static_cast<uint8_t>(call_.reduction);
  header.algorithm = program_.algorithm;
  header.message = step.message;
  header.segment = static_cast<uint32_t>(number_of(segment.position));
  header.root = call_.root;
  header.total = total_of(step.slot);
  return header;
}

void Collective::seal(Segment& segment, int index) {
  const Step& step = program_.steps[index];
  const Stopwatch sealing(stats_.seal_ns);
  Header header = new_header(segment, step);
  const uint8_t* plain = at(segment, step.slot);
  stats_.sealed_records += device_ == nullptr ? 1 : records_in_run(length(segment, step.slot));
  stats_.sealed_bytes += length(segment, step.slot);
  if (device_ != nullptr) return seal_on_device(header, segment, plain, index);
  if (step.action == Action::send) {
    header.kind = Kind::pair;
    links_[step.peers[0]]->send(header, plain);
  } else {
    publish(header, plain, step.peers);
  }
}

// Seals the record once and sends the same ciphertext to all `peers`.
void Collective::publish(Header& header, const uint8_t* plain, const std::vector<int>& peers) {
  header.kind = Kind::group;
  header.sender = static_cast<uint32_t>(keyring_.rank);
  header.receiver = kEveryone;
  header.lane = keyring_.lane;
  BufferRef sealed = pool_.take();
  sealed->size = kRecordOverhead + header.length;
  seal_record(*keyring_.own_group, keyring_.context, header, plain, sealed->record);
  for (int peer : peers) links_[peer]->enqueue(sealed);
}

// ---- what comes from others --------------------------------------------------------------------

bool Collective::receive_all() {
  bool moved = false;
  for (int peer : program_.sources) {
    if (expected_[peer] != 0 && links_[peer]) moved |= receive(*links_[peer]);
  }
  for (int peer : area_readers_) {
    if (expected_[peer] == 0 && wires_->lent_to(peer)) moved |= receive(*links_[peer]);
  }
  return moved;
}

// Reads from the link and takes at most one record.
bool Collective::receive(Link& link) {
  bool moved = false;
  try {
    moved = link.fill();
  } catch (const Failure& failure) {
    // The sealer's record numbers have a gap. If this authentic record does not fit our call, the missing
    // records were not lost on the way: the ranks are in different collectives, and require_same() says so.
    if (failure.code == FailureCode::missing && link.header().collective == call_.number) {
      require_same(link);
    }
    throw;
  }
  const bool lent = wires_ != nullptr && wires_->lent_to(link.peer);
  if (link.ended() && (expected_[link.peer] != 0 || lent || !link.idle() || link.broken())) {
    throw peer_closed(link.peer, "the peer left the group");
  }
  if (!link.ready()) return moved;
  switch (link.header().kind) {
    case Kind::alert: {
      link.open(link.arrived_payload());
      Failure failure = decode_alert({link.arrived_payload(), link.header().length}, link.peer,
                                     keyring_.rank, static_cast<int>(links_.size()));
      if (link.header().collective != 0) {
        failure.views[link.peer] =
            names().rank(link.peer) + ": " + names().view(View::from(link.header()));
      }
      throw failure;
    }
    case Kind::bye:
      link.open(link.arrived_payload());
      link.said_bye = true;
      link.take();
      return true;
    case Kind::pair:
    case Kind::group:
      return take_data(link) || moved;
    case Kind::status:
      on_status(link);
      return false;  // no progress: ranks that only tell each other that they wait must time out
    case Kind::fetched:
      on_fetched(link);
      return true;
    case Kind::announce:
    case Kind::accept:
    case Kind::data:
      throw Failure(FailureCode::tampered, link.peer, "a message came over a collectives' link");
  }
  return moved;
}

// Takes the record at the head of the link if its place in the program has come.
bool Collective::take_data(Link& link) {
  const Header& header = link.header();
  if (header.collective > call_.number && expected_[link.peer] == 0)
    return false;  // the peer is ahead of us
  require_same_place(link);
  const int origin = header.kind == Kind::group ? static_cast<int>(header.sender) : -1;
  const int index = program_.receiving_step(link.peer, origin, header.message);
  if (index < 0 || !same_call(header, total_of(program_.steps[index].slot))) require_same(link);
  const uint64_t position = header.segment / records_per_segment_;
  const uint64_t number = cut_.segment_at(position);
  const bool has_place =
      index >= 0 && cut_.in_this_lane(position) && number < cut_.segments_of(index);
  if (has_place && number >= opened_) return false;
  Segment& segment = window_[number % window_.size()];
  if (!has_place) {
    throw Failure(FailureCode::out_of_step, link.peer,
                  names().rank(link.peer) + " sent a record of " + names().rank(header.sender) +
                      " that has no place in " + names().rank(keyring_.rank) +
                      "'s program: they disagree on the way it takes");
  }
  if (segment.number != number || segment.done[index]) {
    throw Failure(FailureCode::replayed, link.peer, "a record's place in the collective is taken");
  }
  const Step& step = program_.steps[index];
  if (header.length != first_length(segment, step.slot) || header.segment != number_of(position)) {
    throw Failure(FailureCode::out_of_step, link.peer, "the peer cuts the tensor differently");
  }
  if (exchanges_with(link.peer)) return announce(link, segment, index);
  if (segment.waits[index] != 0) return false;
  if (device_ != nullptr) return open_on_device(link, segment, index);
  // A forward never waits for room on a link, because in a ring all ranks could then wait for each other. The
  // window limits how much can queue up.
  const std::vector<int>& forwards = program_.forwards[index];
  const auto linked = [this](int peer) { return links_[peer] != nullptr; };
  for (int forward : forwards) {
    const std::vector<int>& peers = program_.steps[forward].peers;
    if (!std::all_of(peers.begin(), peers.end(), linked)) return false;  // until that link is made
  }
  // The record is opened and checked in memory that only this process sees, before its content is used.
  uint8_t* plain = link.arrived_payload();
  if (!forwards.empty()) {
    if (!plain_) plain_ = pool_.take();
    plain = plain_->payload();
  }
  {
    const Stopwatch opening(stats_.open_ns);
    link.open(plain);
  }
  ++stats_.opened_records;
  stats_.opened_bytes += header.length;
  apply(segment, index, plain);
  if (--expected_[link.peer] == 0) link.expecting = false;
  const BufferRef record = link.take();
  for (int forward : forwards) {
    for (int peer : program_.steps[forward].peers) links_[peer]->enqueue(record);
    ++stats_.forwarded_records;
    finish(segment, forward);
  }
  finish(segment, index);
  return true;
}

void Collective::apply(Segment& segment, int index, const uint8_t* plain) {
  const Step& step = program_.steps[index];
  const size_t bytes = length(segment, step.slot);
  if (bytes == 0) return;
  const Stopwatch reducing(stats_.reduce_ns);
  if (step.action == Action::receive_reduce) {
    reduce_(at(segment, step.slot), plain, bytes);
  } else {
    std::memcpy(at(segment, step.slot), plain, bytes);
  }
}

bool Collective::take_latecomers() {
  latecomers_.place(latecomers_.links.take());
  status_sent_.reset();  // the new links have not been sent our status
  for (int peer : program_.sources) {
    if (links_[peer] && expected_[peer] != 0) links_[peer]->expecting = true;
  }
  return true;
}

bool Collective::flush_all() {
  bool moved = false;
  for (const auto& link : links_) {
    if (link && !link->idle()) moved |= link->flush();
  }
  return moved;
}

}  // namespace sealring
