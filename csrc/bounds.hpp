#pragma once

#include "step.hpp"

namespace chronica {

/// A load and the integer speed it is divided by: an exact rational time.
struct Time {
  std::int64_t load = 0;
  std::int64_t speed = 1;

  friend bool operator<(const Time& a, const Time& b) noexcept {
    return Wide{a.load} * b.speed < Wide{b.load} * a.speed;
  }
};

/// A time that no assignment of this step can beat, for uniform machines (Q||Cmax) with these counts.
Time lower_bound(const Step& step, const Speeds& speeds, CountRange counts, bool padded);

}  // namespace chronica
