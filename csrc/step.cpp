#include "step.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <numeric>

#include "descending.hpp"

namespace chronica {
namespace {

/// Of equal cost the largest first, so that the last sample is the cheapest and the smallest of these.
void order_ties_by_size(std::vector<Keyed>& order, std::span<const double> sizes) {
  const auto size = [sizes](const Keyed& each) { return sizes[static_cast<std::size_t>(each.place)]; };
  for (auto first = order.begin(); first != order.end();) {
    const auto end = std::find_if(first, order.end(), [first](const Keyed& each) { return each.key != first->key; });
    if (end - first > 1) {
      std::stable_sort(first, end, [size](const Keyed& a, const Keyed& b) { return size(a) > size(b); });
    }
    first = end;
  }
}

}  // namespace

int exponent_for(double largest, std::int64_t count) {
  constexpr int kIntegerBits = 52;
  if (largest == 0.0) {
    return 0;
  }
  const int count_bits = static_cast<int>(std::bit_width(static_cast<std::uint64_t>(count)));
  return kIntegerBits - (std::ilogb(largest) + 1) - count_bits;
}

Scale::Scale(int exponent) : half_(std::ldexp(1.0, exponent / 2)), other_(std::ldexp(1.0, exponent - exponent / 2)) {}

Speeds::Speeds(std::span<const double> speeds)
    : speed_(speeds.size()),
      fastest_first_(speeds.size()),
      exponent_(
          exponent_for(*std::max_element(speeds.begin(), speeds.end()), static_cast<std::int64_t>(speeds.size()))) {
  const Scale scaled(exponent_);
  std::transform(speeds.begin(), speeds.end(), speed_.begin(),
                 [scaled](double speed) { return std::max<std::int64_t>(1, scaled(speed)); });
  std::iota(fastest_first_.begin(), fastest_first_.end(), std::int64_t{0});
  std::stable_sort(fastest_first_.begin(), fastest_first_.end(),
                   [this](std::int64_t a, std::int64_t b) { return (*this)[a] > (*this)[b]; });
  sum_ = std::accumulate(speed_.begin(), speed_.end(), std::int64_t{0});
  uniform_ = fastest() == slowest();
}

double Speeds::time(std::int64_t load, std::int64_t speed, int load_exponent) const noexcept {
  return std::ldexp(static_cast<double>(load) / static_cast<double>(speed), exponent_ - load_exponent);
}

double Speeds::load(double time, std::int64_t speed, int load_exponent) const noexcept {
  return std::ldexp(time * static_cast<double>(speed), load_exponent - exponent_);
}

Step::Step(std::span<const double> costs, std::span<const double> sizes, double fixed_cost, std::int64_t rank_count,
           bool is_padded)
    : cost(costs.size()), size(costs.size()), position(costs.size()), padded(is_padded) {
  std::vector<Keyed> order = descending(padded ? sizes : costs);
  if (!padded) {
    order_ties_by_size(order, sizes);
  }

  // Each sample in a micro-batch of its own, and a filler on every rank: no load is larger.
  const double largest = fixed_cost + *std::max_element(costs.begin(), costs.end());
  exponent = exponent_for(largest, static_cast<std::int64_t>(costs.size()) + rank_count);
  const Scale scaled(exponent);
  fixed = scaled(fixed_cost);
  for (std::size_t i = 0; i < order.size(); ++i) {
    const auto at = static_cast<std::size_t>(order[i].place);
    position[i] = order[i].place;
    cost[i] = scaled(costs[at]);
    size[i] = sizes[at];
  }
}

}  // namespace chronica
