#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

namespace chronica {

/// A place in a span and the value there.
struct Keyed {
  double key;
  std::int64_t place;
};

/// The places of values that are not negative, the largest value first; equal ones in their order.
///
/// Sorted by the bytes of the values, the last first (radix sort): the bits of such doubles are ordered as they are.
/// Bytes that all values share are left out, so whole numbers, whose last bytes are 0, take two or three rounds.
inline std::vector<Keyed> descending(std::span<const double> values) {
  constexpr std::size_t kBytes = sizeof(double);
  const auto byte_of = [](double key, std::size_t byte) {
    return static_cast<std::size_t>(~std::bit_cast<std::uint64_t>(key) >> (8 * byte) & 0xff);
  };
  std::vector<Keyed> order(values.size());
  std::array<std::array<std::size_t, 256>, kBytes> counts{};
  for (std::size_t i = 0; i < values.size(); ++i) {
    order[i] = {values[i], static_cast<std::int64_t>(i)};
    for (std::size_t byte = 0; byte < kBytes; ++byte) {
      ++counts[byte][byte_of(values[i], byte)];
    }
  }
  std::vector<Keyed> next(values.size());
  for (std::size_t byte = 0; byte < kBytes; ++byte) {
    auto& begin = counts[byte];
    if (begin[byte_of(values[0], byte)] == values.size()) {
      continue;
    }
    std::size_t sum = 0;
    for (std::size_t& count : begin) {
      sum += std::exchange(count, sum);
    }
    for (const Keyed& each : order) {
      next[begin[byte_of(each.key, byte)]++] = each;
    }
    order.swap(next);
  }
  return order;
}

}  // namespace chronica
