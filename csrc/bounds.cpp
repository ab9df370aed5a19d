#include "bounds.hpp"

#include <algorithm>
#include <array>
#include <cstddef>
#include <numeric>
#include <optional>
#include <span>

#include "cut.hpp"
#include "split.hpp"

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

/// The least load of one rank that holds exactly these samples: one micro-batch without padding, else the cheapest cut.
std::int64_t load_of(const Step& step, const Share& share, std::int64_t micro_batches, double capacity) {
  if (!step.padded || micro_batches == 1 || share.size() == 1) {
    return batch_cost(step, share, 0, std::ssize(share));
  }
  const Speeds one(std::array{1.0});
  const Limits limits{{1, std::ssize(share)}, micro_batches, std::span(&capacity, 1)};
  Share cut = share;
  const std::optional<Split> split = Splitter(step, one, limits, 0.0).split(0, cut);
  return split ? split->load : 0;
}

}  // namespace

Time lower_bound(const Step& step, const Speeds& speeds, CountRange counts, std::int64_t micro_batches,
                 double capacity) {
  const std::int64_t samples = step.samples();
  const std::int64_t ranks = speeds.ranks();
  // Fillers cost a micro-batch's fixed cost at least, so there are never fewer of those costs than ranks.
  const std::int64_t total = step.padded ? cheapest_total(step, ranks, ranks * micro_batches, capacity)
                                         : sum(step.cost, 0, samples) + ranks * step.fixed;
  Time bound = std::max(Time{total, speeds.sum()}, largest_samples(step, speeds));

  // The rank of the largest sample takes `least` samples or more, and so does the slowest rank.
  const std::int64_t others = std::clamp<std::int64_t>(counts.least - 1, 0, samples - 1);
  Share smallest(static_cast<std::size_t>(others + 1));
  std::iota(smallest.begin(), smallest.end(), samples - others - 1);
  bound = std::max(bound, Time{load_of(step, smallest, micro_batches, capacity), speeds.slowest()});
  smallest.front() = 0;
  return std::max(bound, Time{load_of(step, smallest, micro_batches, capacity), speeds.fastest()});
}

}  // namespace chronica
