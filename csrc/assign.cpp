#include "assign.hpp"

#include <algorithm>
#include <cstddef>
#include <numeric>

#include "bounds.hpp"
#include "cut.hpp"
#include "pack.hpp"
#include "step.hpp"

namespace chronica {
namespace {

CountRange count_range(std::int64_t samples, std::int64_t ranks, bool equal_counts) {
  if (equal_counts) {
    return {samples / ranks, (samples + ranks - 1) / ranks};
  }
  return {1, samples - ranks + 1};
}

/// A step with fewer samples than ranks: one each, the largest to the fastest; nobody else has real samples.
Shares one_each(const Step& step, const Speeds& speeds) {
  Shares shares(static_cast<std::size_t>(speeds.ranks()));
  for (std::int64_t sample = 0; sample < step.samples(); ++sample) {
    shares[static_cast<std::size_t>(speeds.fastest_first()[static_cast<std::size_t>(sample)])] = {sample};
  }
  return shares;
}

/// Indices into Step::cost, so the smallest is the rank's largest sample.
std::int64_t load_of(const Step& step, const std::vector<std::int64_t>& share, bool padded) {
  const auto cost = [&step](std::int64_t sample) { return step.cost[static_cast<std::size_t>(sample)]; };
  if (padded) {
    const auto count = static_cast<std::int64_t>(share.size());
    return step.fixed + count * cost(*std::min_element(share.begin(), share.end()));
  }
  return std::accumulate(share.begin(), share.end(), step.fixed,
                         [&cost](std::int64_t load, std::int64_t sample) { return load + cost(sample); });
}

Shares solve(const Step& step, const Speeds& speeds, const Time& bound, CountRange counts, bool padded) {
  if (step.samples() < speeds.ranks()) {
    return one_each(step, speeds);
  }
  return padded ? cut_padded(step, speeds, counts) : pack(step, speeds, counts, bound);
}

/// Append one step's shares to the assignment; `first` is the step's place in the block's drawn order.
void append(Assignment& result, const Step& step, const Speeds& speeds, Shares& shares, bool padded,
            std::int64_t first) {
  for (std::int64_t rank = 0; rank < speeds.ranks(); ++rank) {
    auto& share = shares[static_cast<std::size_t>(rank)];
    result.counts.push_back(static_cast<std::int64_t>(share.size()));
    if (share.empty()) {
      share.push_back(step.samples() - 1);  // a filler: the cheapest sample once more
    }
    const std::int64_t load = load_of(step, share, padded);
    result.loads.push_back(speeds.time(load, speeds[rank], step.exponent));
    for (const std::int64_t sample : share) {
      result.positions.push_back(first + step.position[static_cast<std::size_t>(sample)]);
    }
    result.offsets.push_back(static_cast<std::int64_t>(result.positions.size()));
  }
}

}  // namespace

Assignment assign(const Block& block) {
  const Speeds speeds(block.speeds);
  const auto samples = static_cast<std::int64_t>(block.costs.size());
  Assignment result;
  result.offsets.push_back(0);
  for (std::int64_t first = 0; first < samples; first += block.global_batch) {
    const std::int64_t count = std::min(block.global_batch, samples - first);
    const auto costs = block.costs.subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(count));
    const Step step(costs, block.fixed_cost, speeds.ranks());
    const CountRange counts = count_range(count, speeds.ranks(), block.equal_counts);
    const Time bound = lower_bound(step, speeds, counts, block.padded);
    Shares shares = solve(step, speeds, bound, counts, block.padded);
    append(result, step, speeds, shares, block.padded, first);
    result.lower_bounds.push_back(speeds.time(bound.load, bound.speed, step.exponent));
  }
  return result;
}

}  // namespace chronica
