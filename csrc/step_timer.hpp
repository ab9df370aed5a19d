#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <utility>
#include <vector>

namespace chronica {

/// What the caller says about the work between a start and a stop.
struct Work {
  std::int64_t step = 0;
  std::int64_t samples = 0;
  std::int64_t size = 0;   // S1: Σ size (padded: n · max)
  std::int64_t size2 = 0;  // S2: Σ size² (padded: n · max²)
  std::int64_t flops = 0;
};

/// One finished measurement, as `drain` hands it out. Seven int64 without padding: Python reads it as a structured
/// array.
struct Record {
  Work work;
  std::int64_t start_ns = 0;
  std::int64_t elapsed_ns = 0;
};

/// A ring of measurements. `start` and `stop` only take a mark of the clock; times are worked out in `drain`.
///
/// When the ring is full the oldest measurement is overwritten and counted. Not thread-safe: the caller serialises.
template <class Clock>
class StepTimer {
 public:
  explicit StepTimer(std::size_t capacity, Clock clock = Clock{}) : ring_(capacity), clock_(std::move(clock)) {
    if (capacity == 0) {
      throw std::invalid_argument("capacity must be at least 1");
    }
  }

  StepTimer(const StepTimer&) = delete;
  StepTimer& operator=(const StepTimer&) = delete;
  StepTimer(StepTimer&&) noexcept = default;
  StepTimer& operator=(StepTimer&&) noexcept = default;
  ~StepTimer() = default;

  /// Begin a measurement. One that was begun and never stopped (the step raised) is given up.
  void start(const Work& work) {
    open_.work = work;
    is_open_ = true;
    open_.start = clock_.mark();
  }

  /// End the measurement that `start` began. Returns false when none is open.
  [[nodiscard]] bool stop() {
    const auto now = clock_.mark();
    if (!is_open_) {
      return false;
    }
    is_open_ = false;
    open_.stop = now;
    if (stored_ == ring_.size()) {
      ++overwritten_;
      oldest_ = next(oldest_);
    } else {
      ++stored_;
    }
    ring_[newest_] = open_;
    newest_ = next(newest_);
    return true;
  }

  /// Hand out the finished measurements, oldest first, and forget them. Those not ready yet stay for the next call.
  std::vector<Record> drain() {
    std::vector<Record> records;
    records.reserve(stored_);
    while (stored_ > 0 && clock_.ready(ring_[oldest_].stop)) {
      const Entry& entry = ring_[oldest_];
      records.push_back({entry.work, clock_.start_ns(entry.start), clock_.elapsed_ns(entry.start, entry.stop)});
      oldest_ = next(oldest_);
      --stored_;
    }
    return records;
  }

  /// How many measurements were lost because nobody drained in time.
  [[nodiscard]] std::int64_t overwritten() const noexcept { return overwritten_; }

  [[nodiscard]] std::size_t capacity() const noexcept { return ring_.size(); }

 private:
  struct Entry {
    Work work;
    typename Clock::Mark start{};
    typename Clock::Mark stop{};
  };

  [[nodiscard]] std::size_t next(std::size_t slot) const noexcept { return slot + 1 == ring_.size() ? 0 : slot + 1; }

  std::vector<Entry> ring_;
  Clock clock_;
  Entry open_;
  bool is_open_ = false;
  std::size_t newest_ = 0;  // where the next measurement goes
  std::size_t oldest_ = 0;
  std::size_t stored_ = 0;
  std::int64_t overwritten_ = 0;
};

}  // namespace chronica
