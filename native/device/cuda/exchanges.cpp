#include "device/cuda/exchanges.hpp"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "device/channels.hpp"

namespace sealring {
namespace {

using cuda::address;
using cuda::check;

constexpr unsigned kExchangeGlanceUs = 10;
constexpr std::chrono::seconds kPatience{3};
constexpr size_t kLineWords = 32;  // each word has its own cache line
// Added to a number, it exceeds every number that a stream waits for.
constexpr uint32_t kFurthest = 1u << 30;

std::atomic_ref<uint32_t> value(uint32_t* word) { return std::atomic_ref<uint32_t>(*word); }

}  // namespace

CudaExchanges::CudaExchanges(const cuda::Driver& driver, cuda::Handle context,
                             std::span<const uint8_t> ids, int rank, int world)
    : cuda_(driver),
      context_(context),
      rank_(rank),
      world_(world),
      channels_(Channels(world).count()) {
  if (cuda_.wait_value == nullptr || cuda_.write_value == nullptr) {
    throw std::runtime_error("CUDA's driver is too old: it has no cuStreamWaitValue32_v2");
  }
  if (ids.size() != channels_.size() * nccl::kIdBytes)
    throw std::runtime_error("not as many ids of NCCL's as there are channels");
  try {
    void* memory = nullptr;
    const size_t bytes = 2 * channels_.size() * kLineWords * sizeof(uint32_t);
    check(cuda_.allocate_host(&memory, bytes, cuda::kPortable), "cuMemHostAlloc");
    std::memset(memory, 0, bytes);
    words_ = static_cast<uint32_t*>(memory);
    for (size_t i = 0; i < channels_.size(); ++i) {
      Channel& channel = channels_[i];
      std::memcpy(channel.id.bytes, ids.data() + i * nccl::kIdBytes, nccl::kIdBytes);
      channel.stream = cuda::create_urgent_stream(cuda_);
      channel.may_run = words_ + 2 * i * kLineWords;
      channel.ended = channel.may_run + kLineWords;
    }
    const size_t greetings = static_cast<size_t>(world) + 1;
    check(cuda_.allocate(&bytes_, greetings), "cuMemAlloc");
    check(cuda_.fill(bytes_, 0, greetings, channels_[0].stream), "cuMemsetD8Async");
  } catch (...) {
    release();
    throw;
  }
}

CudaExchanges::~CudaExchanges() {
  abandon();
  for (Channel& channel : channels_) {
    if (channel.aborting.joinable()) channel.aborting.join();
  }
  release();
}

void CudaExchanges::release() noexcept {
  for (Channel& channel : channels_) channel.communicator.reset();
  for (Channel& channel : channels_) {
    if (channel.stream == nullptr) continue;
    cuda_.synchronize(channel.stream);
    cuda_.destroy_stream(channel.stream);
  }
  if (bytes_ != 0) cuda_.release(bytes_);
  if (words_ != nullptr) cuda_.release_host(words_);
}

// Makes one communicator after the other: NCCL calls CUDA while it makes one, and CUDA may wait for the
// kernels of another.
bool CudaExchanges::ready() {
  const std::lock_guard<std::mutex> lock(launching_);
  if (abandoned_) throw std::runtime_error("NCCL's communicators were given up");
  if (connected_ == channels_.size()) return true;
  check(cuda_.set_current(context_), "cuCtxSetCurrent");
  Channel& channel = channels_[connected_];
  if (!channel.communicator) {
    channel.communicator =
        std::make_unique<nccl::Communicator>(cuda_.nccl(), channel.id, rank_, world_);
  }
  if (!channel.communicator->settled()) return false;
  if (!std::exchange(channel.greeted, true)) {
    greet(channel, connected_);
    return false;
  }
  const cuda::Result result = cuda_.query_stream(channel.stream);
  if (result == cuda::kNotReady) return false;
  check(result, "cuStreamQuery");
  return ++connected_ == channels_.size();
}

void CudaExchanges::connect(std::vector<int> peers) {
  const std::lock_guard<std::mutex> lock(launching_);
  peers_ = std::move(peers);
  connected_ = 0;
  for (Channel& channel : channels_) channel.greeted = false;
}

// Sends one byte to each peer: NCCL connects and loads its kernels at first use, and that must be complete
// before anything depends on it.
void CudaExchanges::greet(Channel& channel, size_t number) {
  const Channels channels(world_);
  Exchange first;
  for (size_t i = 0; i < peers_.size(); ++i) {
    if (channels.of(rank_, peers_[i]) == number)
      first.sends.push_back({peers_[i], reinterpret_cast<uint8_t*>(bytes_), 1});
    if (channels.of(peers_[i], rank_) == number)
      first.receives.push_back({peers_[i], reinterpret_cast<uint8_t*>(bytes_ + 1 + i), 1});
  }
  if (!first.sends.empty() || !first.receives.empty())
    channel.communicator->exchange(first, channel.stream);
}

void CudaExchanges::plan(std::vector<ExchangeRound> rounds) {
  const std::lock_guard<std::mutex> lock(launching_);
  for (ExchangeRound& each : rounds) {
    unlaunched_ += each.exchanges.size();
    planned_.push_back(std::move(each));
  }
}

void CudaExchanges::launch_planned(const std::function<void(uint32_t)>& launch_kernels) noexcept {
  const std::lock_guard<std::mutex> lock(launching_);
  try {
    for (; !planned_.empty(); planned_.pop_front()) {
      if (abandoned_ || failed_) continue;
      launch_kernels(planned_.front().kernels_before);
      launch(planned_.front());
    }
  } catch (...) {
    failed_ = std::current_exception();
    planned_.clear();
  }
}

// Called by a collective's caller, because NCCL may take long. The thread that runs the collective can end
// the wait with abandon().
void CudaExchanges::launch(const ExchangeRound& round) {
  for (const Exchange& each : round.exchanges) {
    Channel& channel = channels_[each.channel];
    const uint64_t number = ++channel.launched;
    --unlaunched_;
    check(cuda_.wait_value(channel.stream, address(channel.may_run), static_cast<uint32_t>(number),
                           cuda::kNotBefore),
          "cuStreamWaitValue32");
    channel.communicator->exchange(each, channel.stream);
  }
  for (const Exchange& each : round.exchanges) {
    const Channel& channel = channels_[each.channel];
    while (!channel.communicator->settled()) {
      if (abandoned_) return;
      ::usleep(kExchangeGlanceUs);
    }
    mark(channel, channel.launched);
  }
}

void CudaExchanges::mark(const Channel& channel, uint64_t number) {
  check(cuda_.write_value(channel.stream, address(channel.ended), static_cast<uint32_t>(number),
                          cuda::kInOrder),
        "cuStreamWriteValue32");
}

void CudaExchanges::begin(bool ahead) {
  ahead_ = ahead;
  for (Channel& channel : channels_) channel.before = channel.allowed;
}

bool CudaExchanges::allow(const Exchange& exchange) {
  Channel& channel = channels_[exchange.channel];
  if (ahead_) {
    value(channel.may_run)
        .store(static_cast<uint32_t>(++channel.allowed), std::memory_order_release);
    return true;
  }
  completed(exchange.channel);
  if (channel.unmarked != 0) return false;
  const std::lock_guard<std::mutex> lock(launching_);
  if (abandoned_) throw std::runtime_error("NCCL's communicators were given up");
  channel.unmarked = channel.launched = ++channel.allowed;
  channel.communicator->exchange(exchange, channel.stream);
  return true;
}

// Asking NCCL for its errors is no CUDA call, so its failures are seen here. A failure is reported only if
// the links report nothing meanwhile: they know which rank is gone, NCCL does not.
uint64_t CudaExchanges::completed(size_t number) {
  Channel& channel = channels_[number];
  const uint32_t ended = value(channel.ended).load(std::memory_order_acquire);
  const uint32_t gone = ended - static_cast<uint32_t>(channel.before);
  if (ended == static_cast<uint32_t>(channel.allowed)) return gone;
  const std::unique_lock<std::mutex> lock(launching_, std::try_to_lock);
  if (!lock.owns_lock() || abandoned_) return gone;  // a caller uses the communicators
  try {
    if (failed_) std::rethrow_exception(failed_);
    const bool launched = channel.communicator->settled();
    if (channel.unmarked != 0 && launched) mark(channel, std::exchange(channel.unmarked, 0));
  } catch (...) {
    const auto now = std::chrono::steady_clock::now();
    failing_since_ = failing_since_.value_or(now);
    if (now - *failing_since_ > kPatience) throw;
  }
  return gone;
}

bool CudaExchanges::idle() const {
  return connected_ == channels_.size() && unlaunched_ == 0 &&
         std::all_of(channels_.begin(), channels_.end(), [](const Channel& channel) {
           return value(channel.ended).load() == static_cast<uint32_t>(channel.launched);
         });
}

// Aborts each communicator in its own thread. NCCL first tells the communicator's kernels to end and then
// calls CUDA, which may wait for the kernels of other communicators, and for streams that only the calling
// thread releases.
void CudaExchanges::abandon() noexcept {
  if (abandoned_ || words_ == nullptr || idle()) return;
  abandoned_ = true;
  for (Channel& channel : channels_) {
    // Exchanges that were launched run now, and end when NCCL aborts them.
    value(channel.may_run)
        .store(value(channel.ended).load() + kFurthest, std::memory_order_release);
  }
  for (Channel& channel : channels_) {
    if (!channel.communicator) continue;
    channel.aborting = std::thread([this, &channel] {
      cuda_.set_current(context_);
      {
        const std::lock_guard<std::mutex> until_no_caller_is_at_it(launching_);
      }
      channel.communicator->abort();
    });
  }
}

}  // namespace sealring
