#include "stand_ins/host_nccl.hpp"

#include <chrono>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <stdexcept>
#include <thread>
#include <utility>

#include "stand_ins/host_driver.hpp"

namespace sealring {

namespace {

std::atomic<int> changed_rank{-1};
std::atomic<uint64_t> sent_messages{0};

}  // namespace

void HostMeeting::change_next_for(int rank) { changed_rank = rank; }

uint64_t HostMeeting::sent() { return sent_messages; }

struct HostMeeting::Room {
  std::mutex lock;
  std::set<int> present;
  std::map<std::pair<int, int>, std::deque<std::vector<uint8_t>>> on_the_way;  // from, to
};

std::vector<uint8_t> HostMeeting::new_id() {
  static std::atomic<uint64_t> last{0};
  std::vector<uint8_t> id(nccl::kIdBytes);
  const uint64_t number = ++last;
  std::memcpy(id.data(), &number, sizeof number);
  return id;
}

std::shared_ptr<HostMeeting::Room> HostMeeting::find(std::span<const uint8_t> id) {
  static std::mutex lock;
  static std::map<uint64_t, std::weak_ptr<Room>> rooms;
  uint64_t number = 0;
  std::memcpy(&number, id.data(), sizeof number);
  const std::lock_guard<std::mutex> guard(lock);
  std::shared_ptr<Room> room = rooms[number].lock();
  if (!room) rooms[number] = room = std::make_shared<Room>();
  return room;
}

HostMeeting::HostMeeting(std::span<const uint8_t> id, int rank, int world)
    : room_(find(id)),
      aborted_(std::make_shared<std::atomic<bool>>(false)),
      rank_(rank),
      world_(world) {
  const std::lock_guard<std::mutex> guard(room_->lock);
  room_->present.insert(rank);
}

HostMeeting::State HostMeeting::settled() const {
  if (aborted()) return State::aborted;
  const std::lock_guard<std::mutex> guard(room_->lock);
  return static_cast<int>(room_->present.size()) == world_ ? State::ready : State::waiting;
}

void HostMeeting::send(const Transfer& transfer) const {
  if (transfer.bytes > 1) ++sent_messages;
  const std::lock_guard<std::mutex> guard(room_->lock);
  room_->on_the_way[{rank_, transfer.peer}].emplace_back(transfer.at, transfer.at + transfer.bytes);
}

bool HostMeeting::receive(const Transfer& transfer) const {
  const std::lock_guard<std::mutex> guard(room_->lock);
  auto& waiting = room_->on_the_way[{transfer.peer, rank_}];
  if (waiting.empty()) return false;
  if (waiting.front().size() != transfer.bytes)
    throw std::logic_error("a message is not as long as its receiver expects");
  std::memcpy(transfer.at, waiting.front().data(), transfer.bytes);
  if (int expected = rank_;
      transfer.bytes > 1 && changed_rank.compare_exchange_strong(expected, -1))
    transfer.at[transfer.bytes / 2] ^= 0x40;
  waiting.pop_front();
  return true;
}

void HostMeeting::abort() {
  if (aborted_ != nullptr) *aborted_ = true;
}

namespace {

constexpr nccl::Result kInternalError = 3;

struct HostCommunicator {
  HostMeeting meeting;
  std::shared_ptr<std::atomic<bool>> failed = std::make_shared<std::atomic<bool>>(false);
};

// The calls in the calling thread's open NCCL group.
struct Group {
  HostCommunicator* communicator = nullptr;
  HostStream* stream = nullptr;
  Exchange exchange;
};
thread_local Group group;

nccl::Result add(std::vector<Transfer>& to, void* at, size_t bytes, int peer, void* communicator,
                 cuda::Handle stream) {
  group.communicator = static_cast<HostCommunicator*>(communicator);
  group.stream = static_cast<HostStream*>(stream);
  to.push_back({peer, static_cast<uint8_t*>(at), bytes});
  return nccl::kSuccess;
}

// Runs an exchange in the stream: all sends, then all receives, until they are done or the communicator is
// aborted.
void run(const HostMeeting& meeting, const Exchange& exchange, std::atomic<bool>& failed) {
  if (meeting.aborted()) return;
  for (const Transfer& each : exchange.sends) meeting.send(each);
  for (const Transfer& each : exchange.receives) {
    try {
      while (!meeting.receive(each)) {
        if (meeting.aborted()) return;
        std::this_thread::sleep_for(std::chrono::microseconds(20));
      }
    } catch (const std::logic_error&) {
      failed = true;
      while (!meeting.aborted()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      return;
    }
  }
}

nccl::Library make() {
  nccl::Library out{};
  out.new_id = [](nccl::UniqueId* made) {
    const std::vector<uint8_t> id = HostMeeting::new_id();
    return std::memcpy(made->bytes, id.data(), id.size()), nccl::kSuccess;
  };
  out.init = [](void** made, int world, nccl::UniqueId id, int rank, nccl::Config*) {
    const auto* const bytes = reinterpret_cast<const uint8_t*>(id.bytes);
    *made = new HostCommunicator{HostMeeting({bytes, sizeof id.bytes}, rank, world)};
    return nccl::kInProgress;
  };
  out.group_start = [] { return group = {}, nccl::kSuccess; };
  out.send = [](const void* at, size_t bytes, int, int peer, void* communicator,
                cuda::Handle stream) {
    return add(group.exchange.sends, const_cast<void*>(at), bytes, peer, communicator, stream);
  };
  out.receive = [](void* at, size_t bytes, int, int peer, void* communicator, cuda::Handle stream) {
    return add(group.exchange.receives, at, bytes, peer, communicator, stream);
  };
  out.group_end = [] {
    group.stream->put([meeting = group.communicator->meeting, exchange = group.exchange,
                       failed = group.communicator->failed] { run(meeting, exchange, *failed); });
    return nccl::kSuccess;
  };
  out.async_error = [](void* communicator, nccl::Result* state) {
    const auto& own = *static_cast<HostCommunicator*>(communicator);
    *state = *own.failed                                            ? kInternalError
             : own.meeting.settled() == HostMeeting::State::waiting ? nccl::kInProgress
                                                                    : nccl::kSuccess;
    return nccl::kSuccess;
  };
  out.abort = [](void* communicator) {
    static_cast<HostCommunicator*>(communicator)->meeting.abort();
    return delete static_cast<HostCommunicator*>(communicator), nccl::kSuccess;
  };
  out.explain = [](nccl::Result result) {
    return result == kInternalError ? "internal error" : "another error";
  };
  return out;
}

}  // namespace

const nccl::Library& host_nccl() {
  static const nccl::Library made = make();
  return made;
}

}  // namespace sealring
