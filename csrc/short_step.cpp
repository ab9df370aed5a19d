#include "short_step.hpp"

#include <algorithm>
#include <cstddef>
#include <limits>
#include <utility>
#include <vector>

#include "bounds.hpp"
#include "split.hpp"

namespace chronica {

std::optional<Solution> ShortStep::solve() const {
  const std::int64_t least = std::max<std::int64_t>(limits_.counts.least, 1);
  const std::int64_t most = std::max<std::int64_t>(1, step_.samples() / least);
  if (block_.equal_counts || block_.is_dealt || (least == 1 && speeds_.uniform())) {
    return with_real_ranks(most);  // nothing may be, or is, gained by leaving a rank out
  }
  std::optional<Solution> best;
  for (std::int64_t count = most; count >= 1; count -= std::max<std::int64_t>(1, count / 16)) {
    auto trial = with_real_ranks(count);
    if (trial && (!best || finish(*trial) < finish(*best))) {
      best = std::move(trial);
    }
  }
  return best;
}

/// So many ranks take the samples, the others fillers.
std::optional<Solution> ShortStep::with_real_ranks(std::int64_t count) const {
  auto real = solve_for(count);
  if (!real) {
    return std::nullopt;
  }
  const auto ranks = static_cast<std::size_t>(speeds_.ranks());
  Solution solution{Shares(ranks, filler()), std::vector<Split>(ranks), std::vector<char>(ranks, 1)};
  Splitter splitter(step_, speeds_, limits_, block_.comm);
  for (std::int64_t place = 0; place < speeds_.ranks(); ++place) {
    const auto rank = static_cast<std::size_t>(rank_at(place));
    if (place < count) {
      solution.shares[rank] = std::move(real->shares[static_cast<std::size_t>(place)]);
      solution.splits[rank] = std::move(real->splits[static_cast<std::size_t>(place)]);
      solution.is_filler[rank] = 0;
      continue;
    }
    auto split = splitter.split(rank_at(place), solution.shares[rank]);
    if (!split) {
      return std::nullopt;
    }
    solution.splits[rank] = std::move(*split);
  }
  return solution;
}

/// The step as if there were only the ranks with real samples.
std::optional<Solution> ShortStep::solve_for(std::int64_t count) const {
  std::vector<double> speeds;
  std::vector<double> capacity;
  for (std::int64_t place = 0; place < count; ++place) {
    speeds.push_back(block_.speeds[static_cast<std::size_t>(rank_at(place))]);
    capacity.push_back(limits_.capacity[static_cast<std::size_t>(rank_at(place))]);
  }
  const Speeds own_speeds(speeds);
  const std::int64_t least = std::clamp<std::int64_t>(limits_.counts.least, 1, step_.samples());
  const Limits own{{least, step_.samples() - least * (count - 1)}, limits_.micro_batches, capacity};
  if (block_.is_dealt) {
    return keep(step_, own_speeds, own, block_.comm, in_turn(step_, count));
  }
  const Time bound =
      lower_bound(step_, own_speeds, own.counts, own.micro_batches, std::numeric_limits<double>::infinity());
  return chronica::solve(step_, own_speeds, own, block_.comm, bound);
}

Share ShortStep::filler() const {
  Share samples(static_cast<std::size_t>(block_.least));
  for (std::size_t i = 0; i < samples.size(); ++i) {
    samples[i] = step_.samples() - 1 - static_cast<std::int64_t>(i) % step_.samples();
  }
  std::sort(samples.begin(), samples.end());
  return samples;
}

double ShortStep::finish(const Solution& solution) const {
  const Splitter splitter(step_, speeds_, limits_, block_.comm);
  double latest = 0.0;
  for (std::int64_t rank = 0; rank < speeds_.ranks(); ++rank) {
    latest = std::max(latest, splitter.finish(rank, solution.splits[static_cast<std::size_t>(rank)]));
  }
  return latest;
}

/// The n-th rank to get real samples.
std::int64_t ShortStep::rank_at(std::int64_t place) const {
  return block_.is_dealt ? place : speeds_.fastest_first()[static_cast<std::size_t>(place)];
}

}  // namespace chronica
