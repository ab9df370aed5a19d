#include "policies.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <iterator>
#include <numeric>
#include <random>
#include <utility>

#include "nearest.hpp"

namespace chronica {
namespace {

using Engine = std::mt19937_64;  // its numbers are fixed by the standard, unlike those of the distributions

std::vector<std::size_t> shuffled(std::size_t count, Engine& engine) {
  std::vector<std::size_t> order(count);
  std::iota(order.begin(), order.end(), std::size_t{0});
  for (std::size_t left = count; left > 1; --left) {
    std::swap(order[left - 1], order[engine() % left]);  // uneven by less than count / 2^64
  }
  return order;
}

/// A step's place in the order of all samples, and its ranks' places in it.
struct Slots {
  std::size_t first;
  std::size_t samples;
  std::size_t ranks;

  [[nodiscard]] std::size_t count(std::size_t rank) const { return samples / ranks + (rank < samples % ranks ? 1 : 0); }
  [[nodiscard]] std::size_t first_of(std::size_t rank) const {
    return first + rank * (samples / ranks) + std::min(rank, samples % ranks);
  }
};

std::vector<Slots> steps_of(const Pool& pool) {
  const auto global_batch = static_cast<std::size_t>(pool.global_batch);
  std::vector<Slots> steps;
  for (std::size_t first = 0; first < pool.costs.size(); first += global_batch) {
    steps.push_back({first, std::min(global_batch, pool.costs.size() - first), pool.speeds.size()});
  }
  return steps;
}

std::vector<std::int64_t> deal_static(const Pool& pool) {
  const auto samples = static_cast<double>(pool.costs.size());
  const auto local_batch = static_cast<double>(pool.global_batch) / static_cast<double>(pool.speeds.size());
  const double mean = std::accumulate(pool.costs.begin(), pool.costs.end(), 0.0) / samples;
  // The published capacity is rounded, for sizes are whole numbers; costs in seconds it would round to nothing.
  const bool is_whole =
      std::all_of(pool.costs.begin(), pool.costs.end(), [](double cost) { return cost == std::floor(cost); });
  const double capacity = is_whole ? std::round(mean * local_batch) : mean * local_batch;

  Remaining remaining(pool.costs);
  std::vector<std::int64_t> order;
  order.reserve(pool.costs.size());
  for (const Slots& step : steps_of(pool)) {
    for (std::size_t rank = 0; rank < step.ranks; ++rank) {
      double load = 0.0;
      for (std::size_t slot = 0; slot < step.count(rank); ++slot) {
        const std::size_t place = remaining.nearest(capacity - load);
        remaining.take(place);
        order.push_back(remaining.sample(place));
        load += remaining.cost(place);
      }
    }
  }
  return order;
}

std::vector<std::int64_t> deal_dynamic(const Pool& pool, Engine& engine) {
  Remaining remaining(pool.costs);
  // The first place of a shuffled order that is not taken yet is uniform over the samples that remain.
  const std::vector<std::size_t> drawn = shuffled(pool.costs.size(), engine);
  auto pivot = drawn.begin();

  std::vector<std::int64_t> order(pool.costs.size());
  for (const Slots& step : steps_of(pool)) {
    std::vector<double> work(step.ranks, pool.fixed_cost);
    // The time to reach rises with every sample, within a round too, so a rank sees what those before it have just
    // taken: as in the public code (9rum/flatflow, scheduler/scheduler.go, DynamicScheduler). Ours is not rounded.
    double longest = 0.0;
    for (std::size_t round = 0; round < step.count(0); ++round) {
      for (std::size_t rank = 0; rank < step.ranks && round < step.count(rank); ++rank) {
        const double speed = pool.speeds[rank];
        std::size_t place = 0;
        if (round == 0 && rank == 0) {
          pivot = std::find_if(pivot, drawn.end(), [&](std::size_t at) { return remaining.holds(at); });
          place = *pivot;
        } else {
          place = remaining.nearest((longest - work[rank] / speed) * speed);
        }
        remaining.take(place);
        order[step.first_of(rank) + round] = remaining.sample(place);
        work[rank] += remaining.cost(place);
        longest = std::max(longest, work[rank] / speed);
      }
    }
  }
  return order;
}

std::vector<std::int64_t> build(Policy policy, const Pool& pool, Engine& engine) {
  switch (policy) {
    case Policy::kStatic:
      return deal_static(pool);
    case Policy::kDynamic:
      return deal_dynamic(pool, engine);
    case Policy::kGuided:
      break;
  }
  return ascending(pool.costs);
}

}  // namespace

std::vector<std::int64_t> deal(Policy policy, const Pool& pool) {
  Engine engine(pool.seed);
  const std::vector<std::int64_t> built = build(policy, pool, engine);
  const std::size_t whole_steps = built.size() / static_cast<std::size_t>(pool.global_batch);

  std::vector<std::int64_t> dealt;
  dealt.reserve(built.size());
  for (const std::size_t step : shuffled(whole_steps, engine)) {
    const auto first = built.begin() + static_cast<std::ptrdiff_t>(step) * pool.global_batch;
    dealt.insert(dealt.end(), first, first + pool.global_batch);
  }
  dealt.insert(dealt.end(), built.begin() + std::ssize(dealt), built.end());
  return dealt;
}

}  // namespace chronica
