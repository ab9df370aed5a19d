#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "clock.hpp"
#include "cuda_driver.hpp"

namespace chronica {

/// The clock of work on a CUDA device: two events around it on its stream. It neither waits for the device nor
/// disturbs a graph capture: on a stream that is being captured nothing is recorded.
///
/// Whatever the driver refuses is an interval that cannot be taken, and `failure` says why; nothing throws. Events are
/// kept for reuse until the clock ends. All intervals are on the device of the first one. In a process forked from one
/// that used the driver, no interval can be taken, and those begun before are lost.
class EventClock {
 public:
  struct Pair {
    cuda::Event start = nullptr;
    cuda::Event stop = nullptr;
  };
  struct Interval {
    Pair events;
    cuda::Stream stream = nullptr;
    std::int64_t start_ns = 0;
  };

  /// `most_intervals`: how many are held at a time, at most.
  explicit EventClock(std::size_t most_intervals, const cuda::Driver& driver = cuda::driver())
      : driver_(&driver), most_intervals_(most_intervals) {}
  EventClock(const EventClock&) = delete;
  EventClock& operator=(const EventClock&) = delete;
  EventClock(EventClock&&) noexcept = default;
  EventClock& operator=(EventClock&&) = delete;
  ~EventClock();

  /// Begin on a stream of the device's primary context; the null stream is its default stream.
  bool begin(Interval& interval, int device, cuda::Stream stream);
  /// End on the stream of the beginning, whichever stream and device are current in this thread.
  bool end(Interval& interval);
  [[nodiscard]] Reading read(const Interval& interval);
  static std::int64_t start_ns(const Interval& interval) noexcept { return interval.start_ns; }
  void release(Interval& interval) { free_.push_back(interval.events); }
  [[nodiscard]] std::string_view failure() const noexcept { return failure_; }
  static std::string_view name() noexcept { return "CUDA events"; }

 private:
  class ContextScope;
  class RelaxedScope;

  bool may_call();
  bool retain_context(int device);
  bool grow();
  bool record(cuda::Event event, cuda::Stream stream);
  /// Call a function of the driver; false, and noted as the failure unless it is about a capture, if it refuses.
  template <class... Parameters, class... Arguments>
  bool succeeds(const cuda::Function<Parameters...>& function, Arguments... arguments);
  bool succeeded(const char* function, cuda::Result result);

  const cuda::Driver* driver_;
  std::size_t most_intervals_;
  cuda::Context context_ = nullptr;  // retained for ever: events may outlive whoever else retains it
  std::vector<Pair> pairs_;          // all there are
  std::vector<Pair> free_;           // the one used last comes first
  std::string failure_;
};

}  // namespace chronica
