#include "stand_ins/host_driver.hpp"

#include <atomic>
#include <bit>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "device/cuda/launch.hpp"
#include "stand_ins/host_device.hpp"
#include "stand_ins/host_nccl.hpp"

namespace sealring {
namespace {

struct Event {
  std::atomic<uint64_t> recorded{0}, reached{0};
};

HostStream& stream_of(cuda::Handle handle) { return *static_cast<HostStream*>(handle); }
// As in CUDA, a destroyed event lives until the streams that were given it have come to it.
using EventRef = std::shared_ptr<Event>;
EventRef& event_of(cuda::Handle handle) { return *static_cast<EventRef*>(handle); }
uint8_t* memory_at(cuda::Pointer at) { return reinterpret_cast<uint8_t*>(at); }
std::atomic_ref<uint32_t> number_at(cuda::Pointer at) {
  return std::atomic_ref<uint32_t>(*reinterpret_cast<uint32_t*>(at));
}

void glance() { std::this_thread::sleep_for(std::chrono::microseconds(20)); }

// ---- kernels -----------------------------------------------------------------------------------

struct Function {
  HostKernel kernel;
  DType dtype;
  ReduceKind kind;
};

Function function_of(cuda::Handle handle) {
  const auto number = reinterpret_cast<uint64_t>(handle);
  return {static_cast<HostKernel>(number & 0xff), static_cast<DType>(number >> 8 & 0xff),
          static_cast<ReduceKind>(number >> 16 & 0xff)};
}

void on_records(const gpu::Launch& launch, gpu::Action action, const Function& function) {
  const bool seals = action == gpu::Action::seal;
  const gpu::Wire& wire = seals ? launch.out : launch.in;
  KeyBytes key;
  std::memcpy(key.data(), memory_at(wire.key), key.size());
  HostDevice device(0, 1);
  device.begin({0, function.dtype, function.kind, 1, 1.0, 0, 0, {}});
  const Device::Record record{
      device.add_key(key), wire.header, launch.context, launch.bytes, {memory_at(wire.records)}};
  if (seals) {
    device.seal(0, record, memory_at(launch.local));
    return;
  }
  const Device::Ticket ticket =
      device.open(0, record, memory_at(launch.result), action == gpu::Action::open_reduce);
  if (device.settle(ticket) != Device::State::done) {
    std::memset(memory_at(launch.failed), 0, sizeof(uint64_t));
  }
}

void run_command(const gpu::Command& command, const Function& function) {
  const gpu::Launch& launch = command.launch;
  uint8_t* const into = memory_at(launch.result);
  switch (launch.action) {
    case gpu::Action::open:
    case gpu::Action::open_reduce:
      if (command.wire != 0) {
        std::memcpy(memory_at(launch.in.records), memory_at(command.wire),
                    sealed_run_bytes(launch.bytes));
      }
      [[fallthrough]];
    case gpu::Action::seal:
      return on_records(launch, launch.action, function);
    case gpu::Action::copy:
      std::memcpy(into, memory_at(launch.local), launch.bytes);
      return;
    case gpu::Action::fill:
      std::memset(into, static_cast<int>(command.argument), launch.bytes);
      return;
    case gpu::Action::reduce:
      return reduce_function(function.dtype, function.kind)(into, memory_at(launch.local),
                                                            launch.bytes);
    case gpu::Action::average:
      return average(function.dtype, into, launch.bytes, static_cast<uint32_t>(command.argument));
    case gpu::Action::premultiply:
      return premultiply(function.dtype, into, launch.bytes,
                         std::bit_cast<double>(command.argument));
  }
}

// The commands of a batch may run in any order. Here they run in reverse, to find commands that depend on the
// order.
void run_commands(const gpu::Batch& batch, const Function& function) {
  for (uint32_t i = batch.count; i-- > 0;) run_command(batch.commands[i], function);
}

void run_one_batch(const gpu::BatchArgument& argument, const Function& function) {
  const auto* const batch = reinterpret_cast<const gpu::Batch*>(argument.batch);
  // If this kernel got no batch, the host may already write the next batch to this place.
  if (number_at(argument.batch).load(std::memory_order_acquire) != argument.number) return;
  run_commands(*batch, function);
  number_at(argument.done).store(argument.number, std::memory_order_release);
}

void run_all_batches(const gpu::BatchArgument& argument, const Function& function) {
  const auto* const batch = reinterpret_cast<const gpu::Batch*>(argument.batch);
  for (uint32_t number = argument.number;; ++number) {
    while (number_at(argument.batch).load(std::memory_order_acquire) != number) glance();
    const bool dismissed = batch->count == gpu::kStop;
    if (!dismissed) run_commands(*batch, function);
    number_at(argument.done).store(number, std::memory_order_release);
    if (dismissed) return;
  }
}

template <typename Value>
Value argument(void** arguments, size_t index) {
  Value out;
  std::memcpy(&out, arguments[index], sizeof out);
  return out;
}

cuda::Result launch(const cuda::LaunchConfig* config, cuda::Handle handle, void** arguments,
                    void**) {
  const Function function = function_of(handle);
  HostStream& stream = stream_of(config->stream);
  const auto bytes_at = [&](size_t index) { return argument<uint64_t>(arguments, index); };
  switch (function.kernel) {
    case HostKernel::seal:
    case HostKernel::open:
    case HostKernel::open_reduce: {
      const auto action = static_cast<gpu::Action>(static_cast<uint32_t>(function.kernel) - 1);
      stream.put([=, launch = argument<gpu::Launch>(arguments, 0)] {
        on_records(launch, action, function);
      });
      break;
    }
    case HostKernel::reduce:
      stream.put([function, into = argument<uint8_t*>(arguments, 0),
                  from = argument<uint8_t*>(arguments, 1), bytes = bytes_at(2)] {
        reduce_function(function.dtype, function.kind)(into, from, bytes);
      });
      break;
    case HostKernel::average:
      stream.put([function, into = argument<uint8_t*>(arguments, 0), bytes = bytes_at(1),
                  world = argument<uint32_t>(arguments, 2)] {
        average(function.dtype, into, bytes, world);
      });
      break;
    case HostKernel::premultiply:
      stream.put([function, into = argument<uint8_t*>(arguments, 0), bytes = bytes_at(1),
                  factor = argument<double>(arguments, 2)] {
        premultiply(function.dtype, into, bytes, factor);
      });
      break;
    case HostKernel::run_one_batch:
      stream.put([function, argument = argument<gpu::BatchArgument>(arguments, 0)] {
        run_one_batch(argument, function);
      });
      break;
    case HostKernel::run_all_batches:
      stream.put([function, argument = argument<gpu::BatchArgument>(arguments, 0)] {
        run_all_batches(argument, function);
      });
      break;
  }
  return cuda::kSuccess;
}

// ---- the rest ----------------------------------------------------------------------------------

cuda::Result move(cuda::Pointer into, cuda::Pointer from, size_t bytes, cuda::Handle stream) {
  stream_of(stream).put([=] { std::memmove(memory_at(into), memory_at(from), bytes); });
  return cuda::kSuccess;
}

cuda::Driver make() {
  cuda::Driver out{};
  out.init = [](unsigned) { return 0; };
  out.retain_primary = [](cuda::Handle* context, int) { return *context = nullptr, 0; };
  out.release_primary = [](int) { return 0; };
  out.set_current = [](cuda::Handle) { return 0; };
  out.priority_range = [](int* least, int* greatest) { return *least = 0, *greatest = -5, 0; };
  out.create_stream = [](cuda::Handle* made, unsigned, int) { return *made = new HostStream, 0; };
  out.destroy_stream = [](cuda::Handle gone) { return delete &stream_of(gone), 0; };
  out.synchronize = [](cuda::Handle stream) { return stream_of(stream).synchronize(), 0; };
  out.query_stream = [](cuda::Handle stream) {
    return stream_of(stream).idle() ? cuda::kSuccess : cuda::kNotReady;
  };
  out.capture_status = [](cuda::Handle stream, int* status) {
    return *status = stream_of(stream).captured ? 1 : 0, 0;
  };
  out.nccl = host_nccl;
  out.create_event = [](cuda::Handle* made, unsigned) {
    return *made = new EventRef(std::make_shared<Event>()), 0;
  };
  out.destroy_event = [](cuda::Handle gone) { return delete &event_of(gone), 0; };
  out.record_event = [](cuda::Handle handle, cuda::Handle stream) {
    const EventRef event = event_of(handle);
    stream_of(stream).put([event, number = ++event->recorded] { event->reached = number; });
    return 0;
  };
  out.query_event = [](cuda::Handle handle) {
    const Event& event = *event_of(handle);
    return event.reached == event.recorded ? cuda::kSuccess : cuda::kNotReady;
  };
  out.wait_event = [](cuda::Handle stream, cuda::Handle handle, unsigned) {
    const EventRef event = event_of(handle);
    stream_of(stream).put([event, number = event->recorded.load()] {
      while (event->reached < number) glance();
    });
    return 0;
  };
  out.allocate = [](cuda::Pointer* made, size_t bytes) {
    return *made = cuda::address(std::aligned_alloc(256, (bytes + 255) / 256 * 256)), 0;
  };
  out.release = [](cuda::Pointer gone) { return std::free(memory_at(gone)), 0; };
  out.allocate_in = [](cuda::Pointer* made, size_t bytes, cuda::Handle) {
    return host_driver().allocate(made, bytes);
  };
  out.release_in = [](cuda::Pointer gone, cuda::Handle stream) {
    return stream_of(stream).put([gone] { std::free(memory_at(gone)); }), 0;
  };
  out.allocate_host = [](void** made, size_t bytes, unsigned) {
    return *made = std::aligned_alloc(256, (bytes + 255) / 256 * 256), 0;
  };
  out.release_host = [](void* gone) { return std::free(gone), 0; };
  out.to_device = [](cuda::Pointer into, const void* from, size_t bytes, cuda::Handle stream) {
    return move(into, cuda::address(from), bytes, stream);
  };
  out.to_host = [](void* into, cuda::Pointer from, size_t bytes, cuda::Handle stream) {
    return move(cuda::address(into), from, bytes, stream);
  };
  out.on_device = out.copy = move;
  out.register_host = [](void*, size_t, unsigned) { return 0; };
  out.unregister_host = [](void*) { return 0; };
  out.share = [](cuda::IpcHandle* made, cuda::Pointer memory) {
    return std::memcpy(made->bytes, &memory, sizeof memory), 0;
  };
  out.open_shared = [](cuda::Pointer* found, cuda::IpcHandle handle, unsigned) {
    return std::memcpy(found, handle.bytes, sizeof *found), 0;
  };
  out.close_shared = [](cuda::Pointer) { return 0; };
  out.fill = [](cuda::Pointer at, unsigned char with, size_t bytes, cuda::Handle stream) {
    return stream_of(stream).put([=] { std::memset(memory_at(at), with, bytes); }), 0;
  };
  out.launch = launch;
  out.wait_value = [](cuda::Handle stream, cuda::Pointer at, uint32_t value, unsigned) {
    stream_of(stream).put([at, value] {
      while (static_cast<int32_t>(number_at(at).load(std::memory_order_acquire) - value) < 0)
        glance();
    });
    return 0;
  };
  out.write_value = [](cuda::Handle stream, cuda::Pointer at, uint32_t value, unsigned) {
    stream_of(stream).put([at, value] { number_at(at).store(value, std::memory_order_release); });
    return 0;
  };
  return out;
}

}  // namespace

HostStream::~HostStream() {
  put([this] { ended_ = true; });
  thread_.join();
}

void HostStream::put(std::function<void()> task) {
  std::unique_lock<std::mutex> lock(lock_);
  changed_.wait(lock, [this] { return tasks_.size() < kHolds; });
  tasks_.push_back(std::move(task));
  changed_.notify_all();
}

void HostStream::synchronize() {
  std::unique_lock<std::mutex> lock(lock_);
  changed_.wait(lock, [this] { return tasks_.empty(); });
}

bool HostStream::idle() {
  const std::lock_guard<std::mutex> lock(lock_);
  return tasks_.empty();
}

void HostStream::run() {
  while (!ended_) {
    std::function<void()> task;
    {
      std::unique_lock<std::mutex> lock(lock_);
      changed_.wait(lock, [this] { return !tasks_.empty(); });
      task = tasks_.front();
    }
    task();
    const std::lock_guard<std::mutex> lock(lock_);
    tasks_.pop_front();
    changed_.notify_all();
  }
}

const cuda::Driver& host_driver() {
  static const cuda::Driver made = make();
  return made;
}

}  // namespace sealring
