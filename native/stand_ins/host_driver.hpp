// CUDA's driver played by this CPU: streams are threads, device memory is the process's, and kernels
// compute with the GPU's own arithmetic. So what a GPU is given to do, launched or told, can be run on a
// machine that has none. No group can have it.
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
  // As CUDA's queues do, it takes so much and then keeps its caller waiting.
  void put(std::function<void()> task);
  void synchronize();
  bool idle();
  // What CUDA says of a stream whose work becomes a graph.
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

// What stands for the kernels of engine/cuda/kernels.cu; the number of a function also has its dtype and
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
