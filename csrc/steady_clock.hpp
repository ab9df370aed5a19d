#pragma once

#include <chrono>
#include <cstdint>
#include <string_view>

#include "clock.hpp"

namespace chronica {

/// Nanoseconds of the host's steady clock.
inline std::int64_t steady_ns() noexcept {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

/// The clock of work that the host does itself: an interval is complete as soon as it has ended.
struct SteadyClock {
  struct Interval {
    std::int64_t start_ns = 0;
    std::int64_t stop_ns = 0;
  };

  static bool begin(Interval& interval) noexcept {
    interval.start_ns = steady_ns();
    return true;
  }
  static bool end(Interval& interval) noexcept {
    interval.stop_ns = steady_ns();
    return true;
  }
  static Reading read(const Interval& interval) noexcept {
    return {Reading::State::kComplete, interval.stop_ns - interval.start_ns};
  }
  static std::int64_t start_ns(const Interval& interval) noexcept { return interval.start_ns; }
  static void release(Interval& /*interval*/) noexcept {}
  static std::string_view failure() noexcept { return {}; }
  static std::string_view name() noexcept { return "steady clock"; }
};

}  // namespace chronica
