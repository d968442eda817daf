// CUDA's driver played by this CPU: streams are threads, device memory is the process's memory, and kernels
// compute with the GPU's arithmetic. So work for a GPU, given as launches or as commands, can run on a
// machine without one. No group can use it.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

#include "device/cuda/driver.hpp"
#include "reduce/reduce.hpp"

namespace sealring {

class HostStream {
 public:
  HostStream() : thread_([this] { run(); }) {}
  ~HostStream();
  // Like CUDA's queues, it holds a limited number of tasks and then blocks its caller.
  void put(std::function<void()> task);
  void synchronize();
  bool idle();
  // Whether CUDA would report that the stream is captured into a graph.
  bool captured = false;

 private:
  static constexpr size_t kHolds = 1000;
  void run();

  std::mutex lock_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  bool ended_ = false;
  std::thread thread_;
};

// Stands for the kernels of engine/cuda/kernels.cu. A function's number also contains its dtype and
// reduction.
enum class HostKernel : uint8_t {
  seal = 1,
  open,
  open_reduce,
  reduce,
  average,
  premultiply,
  run_one_batch,
  run_all_batches
};
inline uint64_t host_function(HostKernel kernel, DType dtype = DType::bytes,
                              ReduceKind kind = ReduceKind::none) {
  return static_cast<uint64_t>(kernel) | static_cast<uint64_t>(dtype) << 8 |
         static_cast<uint64_t>(kind) << 16;
}

const cuda::Driver& host_driver();

}  // namespace sealring
