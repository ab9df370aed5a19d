#include "bounds.hpp"

#include <algorithm>
#include <cstddef>
#include <numeric>

#include "cut.hpp"

namespace chronica {
namespace {

std::int64_t sum(const std::vector<std::int64_t>& values, std::int64_t first, std::int64_t last) {
  return std::accumulate(values.begin() + first, values.begin() + last, std::int64_t{0});
}

/// The j largest samples lie on at most j ranks; at best on the fastest k ≤ j, each of which also pays the fixed cost.
Time largest_samples(const Step& step, const Speeds& speeds) {
  Time bound{0, 1};
  std::int64_t total = 0;
  Time best{0, 0};  // over k ranks; k only grows with j
  std::int64_t used = 0;
  std::int64_t used_speed = 0;
  const std::int64_t groups = std::min(step.samples(), speeds.ranks());
  for (std::int64_t j = 1; j <= groups; ++j) {
    total += step.cost[static_cast<std::size_t>(j - 1)];
    if (used > 0) {
      best = {total + used * step.fixed, used_speed};
    }
    while (used < j) {
      const std::int64_t next_speed = used_speed + speeds[speeds.fastest_first()[static_cast<std::size_t>(used)]];
      const Time with_one_more{total + (used + 1) * step.fixed, next_speed};
      if (used > 0 && !(with_one_more < best)) {
        break;
      }
      best = with_one_more;
      used_speed = next_speed;
      ++used;
    }
    bound = std::max(bound, best);
  }
  return bound;
}

}  // namespace

Time lower_bound(const Step& step, const Speeds& speeds, CountRange counts, bool padded) {
  const std::int64_t samples = step.samples();
  const std::int64_t ranks = speeds.ranks();
  std::int64_t all_speeds = 0;
  for (std::int64_t rank = 0; rank < ranks; ++rank) {
    all_speeds += speeds[rank];
  }

  const std::int64_t total = padded ? cheapest_cut(step, ranks) : sum(step.cost, 0, samples);
  Time bound{total + ranks * step.fixed, all_speeds};
  bound = std::max(bound, largest_samples(step, speeds));

  // The rank of the largest sample takes `least` samples or more, and so does the slowest rank.
  const std::int64_t others = std::max<std::int64_t>(counts.least - 1, 0);
  const std::int64_t largest =
      padded ? (others + 1) * step.cost.front() : step.cost.front() + sum(step.cost, samples - others, samples);
  const std::int64_t smallest = padded ? (others + 1) * step.cost[static_cast<std::size_t>(samples - others - 1)]
                                       : sum(step.cost, samples - others - 1, samples);
  bound = std::max(bound, Time{step.fixed + largest, speeds.fastest()});
  return std::max(bound, Time{step.fixed + smallest, speeds.slowest()});
}

}  // namespace chronica
