#pragma once

#include <algorithm>
#include <cstdint>

namespace chronica {

/// Whether a padded micro-batch of so many samples, the largest of this size, is within its capacity.
inline bool is_within(double capacity, double size, std::int64_t count) noexcept {
  return size * static_cast<double>(count) <= capacity;
}

/// The most of `count` samples of which that holds: a rounded quotient of the two would not always answer it.
inline std::int64_t most_within(double capacity, double size, std::int64_t count) noexcept {
  if (!is_within(capacity, size, count)) {
    count = std::min(count, static_cast<std::int64_t>(capacity / size) + 1);
    while (count > 0 && !is_within(capacity, size, count)) {
      --count;
    }
  }
  return count;
}

}  // namespace chronica
