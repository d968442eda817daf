#include "transport/link.hpp"

#include <algorithm>

namespace sealring {

Link::Link(int peer, std::unique_ptr<Pipe> pipe, const KeyBytes& send_key,
           const KeyBytes& receive_key, uint64_t rekey_bytes, Keyring& keyring, BufferPool& pool)
    : peer(peer),
      pipe_(std::move(pipe)),
      send_key_(send_key, rekey_bytes),
      receive_key_(receive_key),
      keyring_(keyring),
      pool_(pool),
      commitment_(keyring.commitments->add(keyring.context, keyring.rank, peer, keyring.lane)) {
  if (!keyring.lanes_keys.empty()) {
    lanes_send_key_ = lanes_key(send_key);
    lanes_receive_key_ = lanes_key(receive_key);
  }
  if (keyring.gpu_pool == nullptr) return;
  gpu_send_key_ =
      std::make_unique<SealingKey>(gpu_key(send_key), rekey_bytes, Suite::chacha20_poly1305);
  gpu_receive_key_ = std::make_unique<OpeningKey>(gpu_key(receive_key), Suite::chacha20_poly1305);
}

void Link::forget_lanes_keys() {
  lanes_send_key_.reset();
  lanes_receive_key_.reset();
}

// After half a record nothing may follow: the peer would take it for the other half.
void Link::enqueue(BufferRef record) {
  if (halved_) return;
  commitment_->sent.add(record->record, record->size);
  out_.push_back(std::move(record));
}

void Link::seal(Header& header, const uint8_t* plain, uint8_t* out) {
  header.sender = static_cast<uint32_t>(keyring_.rank);
  header.receiver = static_cast<uint32_t>(peer);
  header.lane = keyring_.lane;
  seal_record(send_key_, keyring_.context, header, plain, out);
}

void Link::send(Header& header, const uint8_t* plain) {
  BufferRef record = pool_.take();
  record->size = kRecordOverhead + header.length;
  seal(header, plain, record->record);
  enqueue(std::move(record));
}

bool Link::flush() {
  if (out_.empty()) return false;
  bool moved = false;
  try {
    while (!out_.empty()) {
      std::array<iovec, kMaxQueued> parts;
      size_t n = 0;
      size_t offered = 0;
      for (const BufferRef& record : out_) {
        if (n == parts.size()) break;
        const size_t skip = n == 0 ? out_offset_ : 0;
        parts[n++] = {record->record + skip, record->size - skip};
        offered += record->size - skip;
      }
      size_t written = pipe_->write({parts.data(), n});
      if (written == 0) break;
      moved = true;
      const bool full = written < offered;
      while (written != 0) {
        const size_t left = out_.front()->size - out_offset_;
        if (written < left) {
          out_offset_ += written;
          break;
        }
        written -= left;
        out_offset_ = 0;
        out_.pop_front();
      }
      if (full) break;
    }
  } catch (const PipeEnded&) {
    if (said_bye) throw peer_closed(peer, "the peer left the group");
    // Records that the peer wrote before it left are still read, and may say why it left. After them comes
    // the end.
    halved_ = out_offset_ != 0;
    out_.clear();
    out_offset_ = 0;
    broken_ = true;
    moved = true;
  } catch (const PipeCorrupted& bad) {
    throw Failure(FailureCode::tampered, peer, bad.what());
  }
  return moved;
}

bool Link::fill() {
  if (ready()) return false;
  if (!in_) {
    in_ = pool_.take();
    have_ = next_have_;
    next_have_ = 0;
    std::copy_n(next_.begin(), have_, in_->record);
    in_->size = kSealedHeaderBytes;
    header_known_ = false;
  }
  if (postponed()) return false;
  bool moved = false;
  try {
    while (!ready()) {
      if (!header_known_ && have_ == kSealedHeaderBytes) {
        if (postponed()) break;
        check_header();
        moved = true;
        continue;
      }
      std::array<iovec, 2> parts{
          {{in_->record + have_, in_->size - have_}, {next_.data(), next_.size()}}};
      size_t n = pipe_->read({parts.data(), header_known_ ? 2u : 1u});
      if (n == 0) break;
      moved = true;
      const size_t mine = std::min(n, in_->size - have_);
      have_ += mine;
      next_have_ = n - mine;
    }
  } catch (const PipeEnded& end) {
    if (have_ != 0 || !said_bye) {
      const char* where = have_ != 0 ? " in the middle of a record" : "";
      const std::string text = std::string(end.what()) + where;
      if (end.error == 0) throw peer_closed(peer, text);
      throw Failure(FailureCode::peer_lost, peer, text);
    }
    ended_ = true;
    moved = true;
  } catch (const PipeCorrupted& bad) {
    throw Failure(FailureCode::tampered, peer, bad.what());
  }
  return moved;
}

bool Link::arm() {
  try {
    return pipe_->arm(wants_read(), !idle());
  } catch (const PipeCorrupted& bad) {
    throw Failure(FailureCode::tampered, peer, bad.what());
  }
}

// True for records of a collective that this rank has not come to, and for messages when no buffer for the
// device is free. Kind and lane are not authentic yet. Believing them here costs time at most, and an
// attacker that can change them could hold the record back as well.
bool Link::postponed() const {
  if (!in_ || header_known_ || have_ != kSealedHeaderBytes) return false;
  const Kind kind = static_cast<Kind>(in_->record[3]);
  if (kind == Kind::group) return !expecting && !keyring_.groups.empty();
  if (kind != Kind::data || keyring_.gpu_pool == nullptr || keyring_.gpu_pool->room() != 0)
    return false;
  Header unproven;
  return Header::decode(in_->record, unproven) && unproven.lane == kGpuLane;
}

OpeningKey& Link::key_of(const Header& header) {
  const bool by_gpu = header.lane != keyring_.lane;
  if (header.kind != Kind::group) return by_gpu ? *gpu_receive_key_ : receive_key_;
  if (header.sender >= keyring_.groups.size() || !keyring_.groups[header.sender]) {
    throw Failure(FailureCode::tampered, peer, "a record names a sealer that is not in the group");
  }
  return *(by_gpu ? keyring_.groups_gpu : keyring_.groups)[header.sender];
}

void Link::check_header() {
  const char* forged = "a record's header was changed on the way, or sealed under other keys";
  if (!Header::decode(in_->record, header_)) throw Failure(FailureCode::tampered, peer, forged);
  const bool data =
      header_.kind == Kind::pair || header_.kind == Kind::group || header_.kind == Kind::data;
  const bool by_gpu = header_.lane == kGpuLane && data && keyring_.gpu_pool != nullptr;
  const bool in_slot = header_.lane >= kWireLane && data && header_.kind != Kind::data &&
                       header_.lane - kWireLane < keyring_.wire_slots;
  if (header_.lane != keyring_.lane && !by_gpu && !in_slot) {
    throw Failure(FailureCode::tampered, peer, forged);
  }
  OpeningKey& key = key_of(header_);
  if (!authentic_header(key, keyring_.context, header_, in_->record)) {
    throw Failure(FailureCode::tampered, peer, forged);
  }
  // From here on a member of the group is known to have written the header. It must still be addressed to us,
  // and be the next in its sequence.
  const uint32_t receiver =
      header_.kind == Kind::group ? kEveryone : static_cast<uint32_t>(keyring_.rank);
  const bool own_words =
      header_.kind == Kind::group || header_.sender == static_cast<uint32_t>(peer);
  if (header_.receiver != receiver || !own_words) {
    throw Failure(FailureCode::tampered, peer,
                  "a record meant for another link came over this one");
  }
  if (only_listening) key.expected_count = std::max(key.expected_count, header_.count);
  if (header_.count > key.expected_count) {
    throw Failure(FailureCode::missing, peer,
                  "record " + std::to_string(key.expected_count) + " did not come; record " +
                      std::to_string(header_.count) + " came in its place");
  }
  if (header_.count < key.expected_count) {
    throw Failure(FailureCode::replayed, peer,
                  "record " + std::to_string(header_.count) + " came a second time");
  }
  BufferPool& pool = by_gpu || in_slot ? *keyring_.gpu_pool : pool_;
  if (header_.length > pool.payload_bytes()) {
    throw Failure(FailureCode::out_of_step, peer, "the peer's records are longer than agreed");
  }
  ++key.expected_count;
  // A published record tells what its sealer does, not what the peer that forwarded it does.
  if (header_.collective != 0 && header_.sender == static_cast<uint32_t>(peer)) {
    seen = View::from(header_);
  }
  if (by_gpu) {
    BufferRef reachable = pool.take();
    std::copy_n(in_->record, kSealedHeaderBytes, reachable->record);
    in_ = std::move(reachable);
  }
  in_->size = in_slot ? kSealedHeaderBytes : kRecordOverhead + header_.length;
  header_known_ = true;
}

void Link::open(uint8_t* plain) {
  if (!open_payload(key_of(header_), keyring_.context, header_, in_->record, plain)) {
    throw Failure(FailureCode::tampered, peer, "a record's payload was changed on the way");
  }
  commitment_->received.add(in_->record, in_->size);
}

BufferRef Link::take_for_device() {
  commitment_->received.expect(in_->record, in_->size);
  return take();
}

BufferRef Link::take() {
  header_known_ = false;
  have_ = 0;
  return std::move(in_);
}

}  // namespace sealring
