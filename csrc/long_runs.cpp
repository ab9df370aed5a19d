#include "long_runs.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "capacity.hpp"

namespace chronica {
namespace {

/// The runs that begin at sample `first`; fewer than ranks where the samples run out.
std::vector<Run> runs_from(const Step& step, const Speeds& speeds, const Limits& limits, double time,
                           std::int64_t first) {
  std::vector<Run> runs;
  for (const std::int64_t rank : speeds.fastest_first()) {
    if (first >= step.samples()) {
      break;
    }
    const auto cost = static_cast<double>(step.cost[static_cast<std::size_t>(first)]);
    const double room = speeds.load(time, speeds[rank], step.exponent) - static_cast<double>(step.fixed);
    const auto left = static_cast<double>(step.samples() - first);
    const double wanted = cost > 0.0 ? std::min(left, std::ceil(room / cost)) : left;
    const std::int64_t count =
        most_within(limits.capacity[static_cast<std::size_t>(rank)], step.size[static_cast<std::size_t>(first)],
                    static_cast<std::int64_t>(std::max(wanted, 1.0)));
    const std::int64_t end = first + std::max<std::int64_t>(1, count);
    runs.push_back({first, end});
    first = end;
  }
  return runs;
}

}  // namespace

std::vector<Run> cheapest_long_runs(const Step& step, const Speeds& speeds, const Limits& limits, double time,
                                    const CheapestCut& cut) {
  std::vector<Run> best;
  std::int64_t least = 0;
  constexpr std::int64_t kPlaces = 64;
  for (std::int64_t first = 0; first < step.samples(); first += 1 + step.samples() / kPlaces) {
    std::vector<Run> runs = runs_from(step, speeds, limits, time, first);
    if (std::ssize(runs) < speeds.ranks()) {
      break;
    }
    // What is before and behind them costs about what the cheapest cut of everything has there.
    std::int64_t total = cut.cost(first) + cut.cost() - cut.cost(runs.back().end);
    for (const Run& run : runs) {
      total += step.fixed + (run.end - run.first) * step.cost[static_cast<std::size_t>(run.first)];
    }
    if (best.empty() || total < least) {
      best = std::move(runs);
      least = total;
    }
  }
  return best;
}

}  // namespace chronica
