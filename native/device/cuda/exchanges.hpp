// A GPU's exchanges with the GPUs of other ranks, by NCCL: a communicator and a stream for each channel
// (device/channels.hpp).
//
// If streams wait for a collective, the thread that runs it must not call CUDA (device/command_queue.hpp). So
// the caller launches all exchanges of the collective ahead. Each one waits for its number in host memory,
// and the running thread writes that number when the records to send are sealed and the headers of the
// records to receive are checked. If no stream waits, the running thread launches an exchange when its time
// has come. Either way the channel's stream writes the exchange's number to host memory when the exchange has
// ended. A channel's exchanges are numbered 1, 2, ... over all collectives of the group.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <thread>
#include <vector>

#include "device/cuda/driver.hpp"
#include "device/cuda/nccl.hpp"

namespace sealring {

class CudaExchanges {
 public:
  // `ids` has an id for each channel, one after the other.
  CudaExchanges(const cuda::Driver& driver, cuda::Handle context, std::span<const uint8_t> ids,
                int rank, int world);
  ~CudaExchanges();
  CudaExchanges(const CudaExchanges&) = delete;
  CudaExchanges& operator=(const CudaExchanges&) = delete;

  // ready() makes the communicators, one after the other. It is called repeatedly, in the context given,
  // until it returns true; it throws if one cannot be made. After connect() it connects them to these peers,
  // which must do the same. Nothing else is exchanged meanwhile.
  bool ready();
  void connect(std::vector<int> peers);

  // ---- for the callers of collectives, one at a time, in the order in which these will be run
  // Plans all rounds of a collective.
  void plan(std::vector<ExchangeRound> rounds);
  // Launches all planned rounds. Before each round it calls `launch_kernels` with the number of the
  // collective's kernels that the round may have to wait for. May block. A failure is thrown later, by
  // completed().
  void launch_planned(const std::function<void(uint32_t)>& launch_kernels) noexcept;

  // ---- for the thread that runs collectives, one after the other
  // Begins a collective; `ahead` says whether its rounds were planned.
  void begin(bool ahead);
  // Lets the channel's next exchange run; false if it cannot be launched yet.
  bool allow(const Exchange& exchange);
  // How many of this collective's exchanges on the channel are complete.
  uint64_t completed(size_t channel);
  // Ends everything under way. If there was anything, nothing can be exchanged afterwards.
  void abandon() noexcept;

 private:
  struct Channel {
    nccl::UniqueId id{};
    std::unique_ptr<nccl::Communicator> communicator;
    cuda::Handle stream = nullptr;
    bool greeted = false;
    // In host memory: the last exchange that may run, and the last that has ended.
    uint32_t* may_run = nullptr;
    uint32_t* ended = nullptr;
    std::atomic<uint64_t> launched{0};  // the last exchange that was launched
    uint64_t allowed = 0;  // the last exchange that was allowed to run
    uint64_t before = 0;  // the last exchange before the collective under way
    uint64_t unmarked = 0;  // an exchange whose launch is not complete; 0 if there is none
    std::thread aborting;
  };

  void greet(Channel& channel, size_t number);
  void launch(const ExchangeRound& round);
  void mark(const Channel& channel, uint64_t number);
  bool idle() const;
  void release() noexcept;

  const cuda::Driver& cuda_;
  const cuda::Handle context_;
  const int rank_, world_;
  std::vector<int> peers_;  // the peers to connect with
  std::vector<Channel> channels_;
  size_t connected_ = 0;  // how many channels are connected
  cuda::Pointer bytes_ = 0;
  uint32_t* words_ = nullptr;

  std::mutex launching_;  // held while a communicator is called
  std::deque<ExchangeRound> planned_;
  std::atomic<uint64_t> unlaunched_{0};  // planned exchanges that are not launched yet
  std::exception_ptr failed_;
  std::atomic<bool> abandoned_{false};
  bool ahead_ = false;  // whether the collective under way was planned
  std::optional<std::chrono::steady_clock::time_point> failing_since_;
};

}  // namespace sealring
