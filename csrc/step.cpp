#include "step.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <numeric>

namespace chronica {
namespace {

/// Integers up to 2^52 are exact in a double, alone and summed once more.
constexpr int kIntegerBits = 52;

/// The exponent e for which `count` values of at most `largest` · 2^e add up to at most 2^52.
int exponent_for(double largest, std::int64_t count) {
  if (largest == 0.0) {
    return 0;
  }
  const int count_bits = static_cast<int>(std::bit_width(static_cast<std::uint64_t>(count)));
  return kIntegerBits - (std::ilogb(largest) + 1) - count_bits;
}

std::int64_t scaled(double value, int exponent) {
  return static_cast<std::int64_t>(std::nearbyint(std::ldexp(value, exponent)));
}

}  // namespace

Speeds::Speeds(std::span<const double> speeds)
    : speed_(speeds.size()),
      fastest_first_(speeds.size()),
      exponent_(
          exponent_for(*std::max_element(speeds.begin(), speeds.end()), static_cast<std::int64_t>(speeds.size()))) {
  std::transform(speeds.begin(), speeds.end(), speed_.begin(),
                 [this](double speed) { return std::max<std::int64_t>(1, scaled(speed, exponent_)); });
  std::iota(fastest_first_.begin(), fastest_first_.end(), std::int64_t{0});
  std::stable_sort(fastest_first_.begin(), fastest_first_.end(),
                   [this](std::int64_t a, std::int64_t b) { return (*this)[a] > (*this)[b]; });
  uniform_ = fastest() == slowest();
}

double Speeds::time(std::int64_t load, std::int64_t speed, int load_exponent) const noexcept {
  return std::ldexp(static_cast<double>(load) / static_cast<double>(speed), exponent_ - load_exponent);
}

Step::Step(std::span<const double> costs, double fixed_cost, std::int64_t rank_count)
    : cost(costs.size()), position(costs.size()) {
  const double largest = std::max(fixed_cost, *std::max_element(costs.begin(), costs.end()));
  exponent = exponent_for(largest, static_cast<std::int64_t>(costs.size()) + rank_count);
  fixed = scaled(fixed_cost, exponent);

  std::iota(position.begin(), position.end(), std::int64_t{0});
  std::stable_sort(position.begin(), position.end(), [&costs](std::int64_t a, std::int64_t b) {
    return costs[static_cast<std::size_t>(a)] > costs[static_cast<std::size_t>(b)];
  });
  std::transform(position.begin(), position.end(), cost.begin(),
                 [&](std::int64_t sample) { return scaled(costs[static_cast<std::size_t>(sample)], exponent); });
}

}  // namespace chronica
