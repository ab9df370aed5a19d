#include "step.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <numeric>

namespace chronica {

int exponent_for(double largest, std::int64_t count) {
  constexpr int kIntegerBits = 52;
  if (largest == 0.0) {
    return 0;
  }
  const int count_bits = static_cast<int>(std::bit_width(static_cast<std::uint64_t>(count)));
  return kIntegerBits - (std::ilogb(largest) + 1) - count_bits;
}

std::int64_t scaled(double value, int exponent) {
  return static_cast<std::int64_t>(std::nearbyint(std::ldexp(value, exponent)));
}

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
  sum_ = std::accumulate(speed_.begin(), speed_.end(), std::int64_t{0});
  uniform_ = fastest() == slowest();
}

double Speeds::time(std::int64_t load, std::int64_t speed, int load_exponent) const noexcept {
  return std::ldexp(static_cast<double>(load) / static_cast<double>(speed), exponent_ - load_exponent);
}

Step::Step(std::span<const double> costs, std::span<const double> sizes, double fixed_cost, std::int64_t rank_count,
           bool is_padded)
    : cost(costs.size()), size(costs.size()), position(costs.size()), padded(is_padded) {
  struct Entry {
    double key;
    std::int64_t position;
  };
  const std::span<const double> keys = padded ? sizes : costs;
  std::vector<Entry> order(costs.size());
  for (std::size_t i = 0; i < order.size(); ++i) {
    order[i] = {keys[i], static_cast<std::int64_t>(i)};
  }
  std::sort(order.begin(), order.end(), [sizes](const Entry& a, const Entry& b) {
    if (a.key != b.key) {
      return a.key > b.key;
    }
    const double size_a = sizes[static_cast<std::size_t>(a.position)];
    const double size_b = sizes[static_cast<std::size_t>(b.position)];
    return size_a > size_b || (size_a == size_b && a.position < b.position);
  });

  // Each sample in a micro-batch of its own, and a filler on every rank: no load is larger.
  const double largest = fixed_cost + *std::max_element(costs.begin(), costs.end());
  exponent = exponent_for(largest, static_cast<std::int64_t>(costs.size()) + rank_count);
  fixed = scaled(fixed_cost, exponent);
  for (std::size_t i = 0; i < order.size(); ++i) {
    const auto at = static_cast<std::size_t>(order[i].position);
    position[i] = order[i].position;
    cost[i] = scaled(costs[at], exponent);
    size[i] = sizes[at];
  }
}

}  // namespace chronica
