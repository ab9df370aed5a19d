#pragma once

#include <cstdint>
#include <vector>

#include "step_timer.hpp"

using Steps = std::vector<std::int64_t>;

/// Drain a timer and say which steps its records name.
template <class Timer>
Steps drained_steps(Timer& timer) {
  Steps steps;
  for (const chronica::Record& record : timer.drain()) {
    steps.push_back(record.work.step);
  }
  return steps;
}
