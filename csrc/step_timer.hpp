#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string_view>
#include <utility>
#include <vector>

#include "clock.hpp"

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

/// A ring of measurements. `start` and `stop` only begin and end an interval of the clock; times are worked out in
/// `drain`.
///
/// When the ring is full the oldest measurement is overwritten and counted. What the clock cannot take is skipped and
/// counted. At most `capacity` + 1 intervals are held at a time. Not thread-safe: the caller serialises.
template <Clock ClockType>
class StepTimer {
 public:
  explicit StepTimer(std::size_t capacity, ClockType clock = ClockType{}) : ring_(capacity), clock_(std::move(clock)) {
    if (capacity == 0) {
      throw std::invalid_argument("capacity must be at least 1");
    }
  }

  StepTimer(const StepTimer&) = delete;
  StepTimer& operator=(const StepTimer&) = delete;
  StepTimer(StepTimer&&) noexcept = default;
  StepTimer& operator=(StepTimer&&) noexcept = default;
  ~StepTimer() = default;

  /// Begin a measurement; `where` is for the clock. One that was begun and never stopped (the step raised) is given up.
  template <class... Where>
  void start(const Work& work, Where... where) {
    if (std::exchange(open_is_, Open::kNone) == Open::kRunning) {
      clock_.release(open_.interval);
    }
    open_.work = work;
    if (clock_.begin(open_.interval, where...)) {
      open_is_ = Open::kRunning;
    } else {
      open_is_ = Open::kSkipped;
      ++skipped_;
    }
  }

  /// End the measurement that `start` began. Returns false when none is open. One that was skipped ends silently.
  [[nodiscard]] bool stop() {
    const Open was = std::exchange(open_is_, Open::kNone);
    if (was == Open::kNone) {
      return false;
    }
    is_last_kept_ = false;
    if (was == Open::kSkipped) {
      return true;
    }
    if (!clock_.end(open_.interval)) {
      skip(open_);
      return true;
    }
    if (stored_ == ring_.size()) {
      ++overwritten_;
      clock_.release(ring_[oldest_].interval);
      oldest_ = next(oldest_);
    } else {
      ++stored_;
    }
    ring_[newest_] = std::move(open_);
    newest_ = next(newest_);
    is_last_kept_ = true;
    return true;
  }

  /// Let the measurement stopped last end now instead, whether or not another has been started since. Nothing happens
  /// when it was drained or skipped; where the clock cannot take the new end, the measurement is skipped.
  void extend() {
    if (!is_last_kept_) {
      return;
    }
    const std::size_t last = (newest_ == 0 ? ring_.size() : newest_) - 1;
    if (!clock_.end(ring_[last].interval)) {
      skip(ring_[last]);
      newest_ = last;
      --stored_;
      is_last_kept_ = false;
    }
  }

  /// Hand out the finished measurements, oldest first, and forget them. From the first on that is not ready yet, they
  /// stay for the next call.
  std::vector<Record> drain() {
    std::vector<Record> records;
    records.reserve(stored_);
    std::size_t read = 0;  // forgotten only when all is read, so that nothing is lost if the clock throws
    for (std::size_t slot = oldest_; read < stored_; slot = next(slot), ++read) {
      const Entry& entry = ring_[slot];
      const Reading reading = clock_.read(entry.interval);
      if (reading.state == Reading::State::kPending) {
        break;
      }
      if (reading.state == Reading::State::kComplete) {
        records.push_back({entry.work, clock_.start_ns(entry.interval), reading.elapsed_ns});
      }
    }
    skipped_ += static_cast<std::int64_t>(read - records.size());
    stored_ -= read;
    is_last_kept_ = is_last_kept_ && stored_ > 0;
    for (; read > 0; --read) {
      clock_.release(ring_[oldest_].interval);
      oldest_ = next(oldest_);
    }
    return records;
  }

  /// How many measurements were lost because nobody drained in time.
  [[nodiscard]] std::int64_t overwritten() const noexcept { return overwritten_; }

  /// How many measurements the clock could not take.
  [[nodiscard]] std::int64_t skipped() const noexcept { return skipped_; }

  /// What went wrong last in the clock; empty if nothing did.
  [[nodiscard]] std::string_view failure() const noexcept { return clock_.failure(); }

  [[nodiscard]] std::string_view clock_name() const noexcept { return clock_.name(); }
  [[nodiscard]] std::size_t capacity() const noexcept { return ring_.size(); }

 private:
  struct Entry {
    Work work;
    typename ClockType::Interval interval{};
  };
  enum class Open { kNone, kRunning, kSkipped };

  void skip(Entry& entry) {
    ++skipped_;
    clock_.release(entry.interval);
  }

  [[nodiscard]] std::size_t next(std::size_t slot) const noexcept { return slot + 1 == ring_.size() ? 0 : slot + 1; }

  std::vector<Entry> ring_;
  ClockType clock_;
  Entry open_;
  Open open_is_ = Open::kNone;
  bool is_last_kept_ = false;  // whether the measurement stopped last is in the ring
  std::size_t newest_ = 0;     // where the next measurement goes
  std::size_t oldest_ = 0;
  std::size_t stored_ = 0;
  std::int64_t overwritten_ = 0;
  std::int64_t skipped_ = 0;
};

}  // namespace chronica
