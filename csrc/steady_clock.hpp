#pragma once

#include <chrono>
#include <cstdint>

namespace chronica {

/// The host's steady clock: a mark is the time itself and is complete as soon as it is taken.
///
/// A clock for `StepTimer` has these members; one whose marks complete later (device events) says so in `ready`.
struct SteadyClock {
  using Mark = std::int64_t;

  static Mark mark() noexcept {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
  }
  static bool ready(Mark /*stop*/) noexcept { return true; }
  static std::int64_t start_ns(Mark start) noexcept { return start; }
  static std::int64_t elapsed_ns(Mark start, Mark stop) noexcept { return stop - start; }
};

}  // namespace chronica
