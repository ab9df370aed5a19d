#include "assign.hpp"

#include <algorithm>
#include <cstddef>
#include <future>
#include <limits>
#include <optional>
#include <utility>

#include "bounds.hpp"
#include "short_step.hpp"
#include "solve.hpp"
#include "split.hpp"
#include "step.hpp"

namespace chronica {
namespace {

constexpr double kUnlimited = std::numeric_limits<double>::infinity();

/// Plans the steps of a block one after the other.
class Assigner {
 public:
  explicit Assigner(const Block& block) : block_(block), speeds_(block.speeds) {}

  /// Plan the steps from sample `first` up to sample `end` of the block.
  Assignment steps(std::int64_t first, std::int64_t end) {
    for (; first < end; first += block_.global_batch) {
      plan(first, std::min(block_.global_batch, end - first));
    }
    return std::move(result_);
  }

 private:
  void plan(std::int64_t first, std::int64_t count) {
    const auto begin = static_cast<std::size_t>(first);
    const Step step(block_.costs.subspan(begin, static_cast<std::size_t>(count)),
                    block_.sizes.subspan(begin, static_cast<std::size_t>(count)), block_.fixed_cost,
                    speeds_.ranks() * block_.least, block_.padded);
    const Limits limits{count_range(count), most_micro_batches(count), block_.capacity};
    const double certain =
        block_.is_hard ? *std::max_element(block_.capacity.begin(), block_.capacity.end()) : kUnlimited;
    const Time bound = lower_bound(step, speeds_, limits.counts, limits.micro_batches, certain);
    std::optional<Solution> solution = solve_step(step, limits, bound);
    if (!solution && !block_.is_hard) {
      solution = solve_with_more(step, limits, bound);
    }
    if (!solution) {
      if (result_.infeasible_step < 0) {
        result_.infeasible_step = first / block_.global_batch;
      }
      return;
    }
    append(step, *solution, first);
    result_.lower_bounds.push_back(speeds_.time(bound.load, bound.speed, step.exponent));
  }

  /// With capacities that exceed those wanted by as little as is tried.
  std::optional<Solution> solve_with_more(const Step& step, const Limits& limits, const Time& bound) {
    std::vector<double> capacity(block_.capacity.size());
    for (const double factor : {1.25, 1.5, 2.0, 4.0, kUnlimited}) {
      std::transform(block_.capacity.begin(), block_.capacity.end(), capacity.begin(),
                     [factor](double each) { return each > 0.0 ? each * factor : kUnlimited; });
      if (auto solution = solve_step(step, {limits.counts, limits.micro_batches, capacity}, bound)) {
        return solution;
      }
    }
    return std::nullopt;
  }

  [[nodiscard]] CountRange count_range(std::int64_t samples) const {
    const std::int64_t ranks = speeds_.ranks();
    if (block_.equal_counts || block_.is_dealt) {
      return {samples / ranks, (samples + ranks - 1) / ranks};
    }
    const std::int64_t least = std::min(block_.least, samples);
    return {least, std::max(least, samples - least * (ranks - 1))};
  }

  /// More than one a sample are no use.
  [[nodiscard]] std::int64_t most_micro_batches(std::int64_t samples) const {
    return std::min(block_.micro_batches, std::max(samples, block_.least));
  }

  std::optional<Solution> solve_step(const Step& step, const Limits& limits, const Time& bound) {
    if (step.samples() < std::max<std::int64_t>(limits.counts.least, 1) * speeds_.ranks()) {
      return ShortStep(block_, step, speeds_, limits).solve();
    }
    if (block_.is_dealt) {
      return keep(step, speeds_, limits, block_.comm, as_dealt(step));
    }
    return solve(step, speeds_, limits, block_.comm, bound);
  }

  /// The drawn order is rank by rank, the first ranks having one sample more where they do not divide evenly.
  [[nodiscard]] Shares as_dealt(const Step& step) const {
    const std::int64_t ranks = speeds_.ranks();
    const std::int64_t each = step.samples() / ranks;
    const std::int64_t more = step.samples() % ranks;
    Shares shares(static_cast<std::size_t>(ranks));
    for (std::int64_t sample = 0; sample < step.samples(); ++sample) {
      const std::int64_t place = step.position[static_cast<std::size_t>(sample)];
      const std::int64_t rank =
          place < more * (each + 1) ? place / (each + 1) : more + (place - more * (each + 1)) / each;
      shares[static_cast<std::size_t>(rank)].push_back(sample);
    }
    return shares;
  }

  /// Write a step down; `first` is its place in the block's drawn order.
  void append(const Step& step, const Solution& solution, std::int64_t first) {
    for (std::int64_t rank = 0; rank < speeds_.ranks(); ++rank) {
      const auto at = static_cast<std::size_t>(rank);
      const Share& share = solution.shares[at];
      const Split& split = solution.splits[at];
      append_batches(step, share, split, first);
      result_.parts.push_back(std::ssize(split.ends));
      result_.counts.push_back(solution.is_filler[at] != 0 ? 0 : std::ssize(share));
      result_.loads.push_back(speeds_.time(split.load, speeds_[rank], step.exponent));
      result_.tails.push_back(kBackwardShare * speeds_.time(split.largest, speeds_[rank], step.exponent));
    }
  }

  /// The micro-batches of a rank, cheapest first: the last one's backward pass is what the allreduce overlaps with.
  void append_batches(const Step& step, const Share& share, const Split& split, std::int64_t first) {
    std::vector<Run> runs;
    std::int64_t begin = 0;
    for (const std::int64_t end : split.ends) {
      runs.push_back({begin, end});
      begin = end;
    }
    const auto cost = [&](const Run& run) { return batch_cost(step, share, run.first, run.end); };
    std::stable_sort(runs.begin(), runs.end(), [&](const Run& a, const Run& b) { return cost(a) < cost(b); });
    for (const Run& run : runs) {
      double length = 0.0;
      for (std::int64_t i = run.first; i < run.end; ++i) {
        const auto sample = static_cast<std::size_t>(share[static_cast<std::size_t>(i)]);
        result_.positions.push_back(first + step.position[sample]);
        length = step.padded ? std::max(length, step.size[sample]) : length + step.size[sample];
      }
      result_.sizes.push_back(run.end - run.first);
      result_.lengths.push_back(length);
    }
  }

  const Block& block_;
  Speeds speeds_;
  Assignment result_;
};

template <class T>
void append_to(std::vector<T>& all, const std::vector<T>& more) {
  all.insert(all.end(), more.begin(), more.end());
}

}  // namespace

Assignment assign(const Block& block, std::int64_t threads) {
  const auto samples = static_cast<std::int64_t>(block.costs.size());
  const std::int64_t steps = (samples + block.global_batch - 1) / block.global_batch;
  threads = std::clamp<std::int64_t>(threads, 1, steps);
  if (threads == 1) {
    return Assigner(block).steps(0, samples);
  }
  std::vector<std::future<Assignment>> parts;
  for (std::int64_t thread = 0; thread < threads; ++thread) {
    const std::int64_t first = steps * thread / threads * block.global_batch;
    const std::int64_t end = std::min(samples, steps * (thread + 1) / threads * block.global_batch);
    parts.push_back(std::async(std::launch::async, [&block, first, end] { return Assigner(block).steps(first, end); }));
  }
  Assignment result;
  for (auto& each : parts) {
    const Assignment part = each.get();
    append_to(result.positions, part.positions);
    append_to(result.sizes, part.sizes);
    append_to(result.lengths, part.lengths);
    append_to(result.parts, part.parts);
    append_to(result.counts, part.counts);
    append_to(result.loads, part.loads);
    append_to(result.tails, part.tails);
    append_to(result.lower_bounds, part.lower_bounds);
    if (result.infeasible_step < 0) {
      result.infeasible_step = part.infeasible_step;
    }
  }
  return result;
}

}  // namespace chronica
