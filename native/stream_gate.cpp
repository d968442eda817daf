#include "stream_gate.hpp"

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <vector>

#include "driver_watch.hpp"

namespace sealring {
namespace {

using cuda::check;

struct Places {
  std::mutex lock;
  std::vector<std::unique_ptr<StreamGate::Place>> all;  // that were ever made
  std::vector<StreamGate::Place*> unused;
};

// Never destroyed: the watch looks at them until the process is gone.
Places& places() {
  static Places& made = *new Places;
  return made;
}

std::atomic_ref<uint32_t> number_of(StreamGate::Place& place) {
  return std::atomic_ref<uint32_t>(*place.number);
}

bool any_closed() {
  const std::lock_guard<std::mutex> lock(places().lock);
  for (const auto& place : places().all) {
    if (number_of(*place).load(std::memory_order_relaxed) != place->drawn) return true;
  }
  return false;
}

// A kernel that is loaded when it is first launched is loaded under the driver's lock, and only when
// the GPU has nothing left to do. A GPU that waits at a gate has, and the thread that would open the
// gate needs that lock.
//
// Streams share the queues that a process has to the hardware, and a stream that waits holds up all
// others of its queue: the engine's among them, which then never come to open the gate. There are 8
// queues unless the environment asks for more. With 8, a tensor of 80 MB on a stream of torch's
// pool hung on an H200; with 32 it did not.
constexpr int kQueues = 32;

void refuse_unless_streams_may_wait(const cuda::Driver& driver) {
  if (driver.wait_value == nullptr) {
    throw std::runtime_error("CUDA's driver is too old: it has no cuStreamWaitValue32_v2");
  }
  int mode = cuda::kEagerLoading;
  if (driver.loading_mode != nullptr) {
    check(driver.loading_mode(&mode), "cuModuleGetLoadingMode");
  }
  if (mode != cuda::kEagerLoading) {
    throw std::runtime_error(
        "CUDA loads kernels when they are first used. Set CUDA_MODULE_LOADING=EAGER before the "
        "process starts");
  }
  const char* const queues = std::getenv("CUDA_DEVICE_MAX_CONNECTIONS");
  if (queues == nullptr || std::atoi(queues) < kQueues) {
    throw std::runtime_error(
        "streams share 8 queues to the GPU, and one that waits holds up its queue. Set "
        "CUDA_DEVICE_MAX_CONNECTIONS=32 before the process starts");
  }
}

StreamGate::Place* make_place(const cuda::Driver& driver, int ordinal) {
  auto place = std::make_unique<StreamGate::Place>();
  place->ordinal = ordinal;
  check(driver.retain_primary(&place->context, ordinal), "cuDevicePrimaryCtxRetain");
  check(driver.set_current(place->context), "cuCtxSetCurrent");
  void* memory = nullptr;
  check(driver.allocate_host(&memory, sizeof(uint32_t), cuda::kPortable), "cuMemHostAlloc");
  place->number = static_cast<uint32_t*>(memory);
  number_of(*place).store(0);
  int least = 0, greatest = 0;
  check(driver.priority_range(&least, &greatest), "cuCtxGetStreamPriorityRange");
  // Streams of one priority may share a queue of the hardware, in which one that is held holds all.
  // The engine's have the greatest, which torch gives to nobody.
  check(driver.create_stream(&place->held, cuda::kNonBlocking, least), "cuStreamCreateWithPriority");
  check(driver.create_stream(&place->free, cuda::kNonBlocking, greatest),
        "cuStreamCreateWithPriority");
  places().all.push_back(std::move(place));
  return places().all.back().get();
}

StreamGate::Place* take_place(const cuda::Driver& driver, int ordinal) {
  auto& unused = places().unused;
  for (auto found = unused.begin(); found != unused.end(); ++found) {
    if ((*found)->ordinal != ordinal) continue;
    StreamGate::Place* const place = *found;
    unused.erase(found);
    return place;
  }
  return make_place(driver, ordinal);
}

[[noreturn]] void end_process() {
  std::fputs(
      "sealring: CUDA has not answered for as long as the group's timeout, while a stream waits for a "
      "collective. Most likely another thread waits inside the driver for the GPU, and the GPU for "
      "this rank's collective, which needs the driver: it would never end. The process ends here. "
      "SEALRING_CUDA_WAIT=host makes wait() block instead (docs/performance.md).\n",
      stderr);
  std::_Exit(1);
}

// What the engine needs too: the lock that launches take, and a stream that no gate holds up.
void watch_driver(const cuda::Driver& driver, int ordinal, double patience_s) {
  static DriverWatch* watch = nullptr;  // one, and for as long as the process lives
  if (watch == nullptr) {
    StreamGate::Place* const place = make_place(driver, ordinal);
    cuda::Handle event = nullptr;
    check(driver.create_event(&event, cuda::kDisableTiming), "cuEventCreate");
    watch = new DriverWatch(
        any_closed,
        [&driver, place, event] {
          driver.set_current(place->context);
          driver.record_event(event, place->free);
          while (driver.query_event(event) == cuda::kNotReady) {
            std::this_thread::sleep_for(std::chrono::milliseconds(10));
          }
        },
        end_process);
  }
  watch->expect_within(patience_s);
}

}  // namespace

StreamGate::StreamGate(int ordinal, double patience_s) : cuda_(cuda::driver()) {
  refuse_unless_streams_may_wait(cuda_);
  const std::lock_guard<std::mutex> lock(places().lock);
  watch_driver(cuda_, ordinal, patience_s);
  place_ = take_place(cuda_, ordinal);
  // Not every GPU can wait at host memory in every mode. This one is open: now is the time to see.
  hold(held(), place_->drawn);
}

StreamGate::~StreamGate() {
  const std::lock_guard<std::mutex> lock(places().lock);
  number_of(*place_).store(place_->drawn);  // nobody is to wait for a group that is gone
  places().unused.push_back(place_);
}

uint32_t StreamGate::close() {
  const std::lock_guard<std::mutex> lock(places().lock);
  return ++place_->drawn;
}

void StreamGate::hold(uint64_t stream, uint32_t ticket) const {
  check(cuda_.set_current(place_->context), "cuCtxSetCurrent");
  // Counts in a circle: "not before" holds as long as no 2^31 tickets are out at once.
  check(cuda_.wait_value(reinterpret_cast<cuda::Handle>(stream),
                         reinterpret_cast<cuda::Pointer>(place_->number), ticket, cuda::kNotBefore),
        "cuStreamWaitValue32");
}

void StreamGate::open(uint32_t ticket) { number_of(*place_).store(ticket, std::memory_order_release); }

}  // namespace sealring
