#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <optional>
#include <vector>

#include "bounds.hpp"
#include "check.hpp"
#include "draw.hpp"
#include "one_batch.hpp"

namespace {

using chronica::Limits;
using chronica::one_batch_each;
using chronica::Shares;
using chronica::Speeds;
using chronica::Step;
using chronica::Time;

constexpr double kUnlimited = std::numeric_limits<double>::infinity();

/// The least makespan of all orders of the ranks and contiguous cuts, and the least total time within a makespan.
class ByTrying {
 public:
  ByTrying(const Step& step, const Speeds& speeds, const Limits& limits)
      : step_(step), speeds_(speeds), limits_(limits), order_(static_cast<std::size_t>(speeds.ranks())) {}

  std::optional<Time> least_makespan() {
    best_.reset();
    within_.reset();
    try_all();
    return best_;
  }

  double least_total(const Time& within) {
    total_ = kUnlimited;
    within_ = within;
    try_all();
    return total_;
  }

 private:
  void try_all() {
    std::iota(order_.begin(), order_.end(), std::int64_t{0});
    do {
      extend(0, 0, Time{0, 1}, 0.0);
    } while (std::next_permutation(order_.begin(), order_.end()));
  }

  void extend(std::size_t place, std::int64_t first, const Time& longest, double total) {
    if (place == order_.size()) {
      if (first == step_.samples()) {
        best_ = best_ ? std::min(*best_, longest) : longest;
        total_ = std::min(total_, total);
      }
      return;
    }
    const std::int64_t rank = order_[place];
    const std::int64_t most = std::min(limits_.counts.most, step_.samples() - first);
    for (std::int64_t count = limits_.counts.least; count <= most; ++count) {
      const std::int64_t load = step_.fixed + count * step_.cost[static_cast<std::size_t>(first)];
      const Time end = std::max(longest, Time{load, speeds_[rank]});
      if (step_.size[static_cast<std::size_t>(first)] * static_cast<double>(count) <=
              limits_.capacity[static_cast<std::size_t>(rank)] &&
          !(within_ && *within_ < end) && !(!within_ && best_ && *best_ < end)) {
        extend(place + 1, first + count, end, total + static_cast<double>(load) / static_cast<double>(speeds_[rank]));
      }
    }
  }

  const Step& step_;
  const Speeds& speeds_;
  const Limits& limits_;
  std::vector<std::int64_t> order_;
  std::optional<Time> best_;
  std::optional<Time> within_;
  double total_ = kUnlimited;
};

struct Found {
  Time makespan{0, 1};
  double total = 0.0;
};

/// What holds for all shares: every sample once, in contiguous cuts that keep the limits.
Found check_shares(const Step& step, const Speeds& speeds, const Limits& limits, const Shares& shares) {
  Found found;
  std::vector<int> seen(step.cost.size(), 0);
  CHECK(std::ssize(shares) == speeds.ranks());
  for (std::int64_t rank = 0; rank < speeds.ranks(); ++rank) {
    const auto& share = shares[static_cast<std::size_t>(rank)];
    const std::int64_t count = std::ssize(share);
    CHECK(count >= limits.counts.least && count <= limits.counts.most);
    CHECK(share.back() - share.front() == count - 1 && std::is_sorted(share.begin(), share.end()));
    const auto first = static_cast<std::size_t>(share.front());
    CHECK(step.size[first] * static_cast<double>(count) <= limits.capacity[static_cast<std::size_t>(rank)]);
    const std::int64_t load = step.fixed + count * step.cost[first];
    found.makespan = std::max(found.makespan, Time{load, speeds[rank]});
    found.total += static_cast<double>(load) / static_cast<double>(speeds[rank]);
    for (const std::int64_t sample : share) {
      ++seen[static_cast<std::size_t>(sample)];
    }
  }
  CHECK(std::all_of(seen.begin(), seen.end(), [](int times) { return times == 1; }));
  return found;
}

/// A small step and ranks of up to three speeds; ranks of the same speed have the same capacity.
struct Trial {
  Step step;
  Speeds speeds;
  std::vector<double> capacity;
  Limits limits;

  Trial(draw::Engine& engine, int kind, std::int64_t kinds_of_speed)
      : Trial(engine, kind, kinds_of_speed, draw::between(engine, 1, 4)) {}

 private:
  Trial(draw::Engine& engine, int kind, std::int64_t kinds_of_speed, std::int64_t ranks)
      : Trial(engine, draw::sizes(engine, ranks + draw::between(engine, 0, 8), kind), kinds_of_speed, ranks) {}

  Trial(draw::Engine& engine, const std::vector<double>& sizes, std::int64_t kinds_of_speed, std::int64_t ranks)
      : step(draw::padded(sizes, static_cast<double>(draw::between(engine, 0, 2) * 9), ranks)),
        speeds(draw::speeds(ranks, kinds_of_speed)),
        capacity(static_cast<std::size_t>(ranks), kUnlimited) {
    if (engine() % 2 == 0) {
      const double unit = step.size.front() * static_cast<double>(draw::between(engine, 2, 14)) / 4.0;
      for (std::size_t rank = 0; rank < capacity.size(); ++rank) {
        capacity[rank] = unit * (engine() % 2 == 0 || rank % 2 == 0 ? 1.0 : 1.5);
      }
      for (std::size_t rank = static_cast<std::size_t>(kinds_of_speed); rank < capacity.size(); ++rank) {
        capacity[rank] = capacity[rank - static_cast<std::size_t>(kinds_of_speed)];
      }
    }
    const std::int64_t samples = step.samples();
    const std::int64_t least = draw::between(engine, 1, samples / ranks);
    limits = {{least, samples - least * (ranks - 1)}, 1, capacity};
    if (engine() % 4 == 0) {
      limits.counts = {samples / ranks, (samples + ranks - 1) / ranks};
    }
  }
};

/// No makespan misses the best by more than two units of the integer costs: what slow ranks may carry is rounded down.
bool is_least(const Time& found, const Time& best) {
  return !(found < best) && !(Time{best.load + 2, best.speed} < found);
}

void the_makespan_is_the_least() {
  draw::Engine engine(1);
  int impossible = 0;
  for (int round = 0; round < 1500; ++round) {
    const Trial trial(engine, round % draw::kKinds, 1 + round % 3);
    const auto shares = one_batch_each(trial.step, trial.speeds, trial.limits);
    const auto best = ByTrying(trial.step, trial.speeds, trial.limits).least_makespan();
    CHECK(shares.has_value() == best.has_value());
    impossible += best ? 0 : 1;
    if (shares && best) {
      CHECK(is_least(check_shares(trial.step, trial.speeds, trial.limits, *shares).makespan, *best));
      const double capacity = *std::max_element(trial.capacity.begin(), trial.capacity.end());
      CHECK(!(*best < chronica::lower_bound(trial.step, trial.speeds, trial.limits.counts, 1, capacity)));
    }
  }
  CHECK(impossible > 50 && impossible < 750);
}

/// `below` the least makespan there is nothing; just above it, only what ends earlier.
void nothing_ends_later_than_asked_for() {
  draw::Engine engine(2);
  for (int round = 0; round < 800; ++round) {
    const Trial trial(engine, round % draw::kKinds, 1 + round % 3);
    const auto shares = one_batch_each(trial.step, trial.speeds, trial.limits);
    if (!shares) {
      continue;
    }
    const Time least = check_shares(trial.step, trial.speeds, trial.limits, *shares).makespan;
    for (const Time& below : {Time{0, 1}, Time{0, 1000}, Time{least.load - least.load / 10 - 1, least.speed}, least,
                              Time{least.load + 1, least.speed}, Time{least.load + 3, least.speed},
                              Time{least.load * 3 / 2 + 3, least.speed}}) {
      const auto earlier = one_batch_each(trial.step, trial.speeds, trial.limits, below);
      if (earlier) {
        const Time end = check_shares(trial.step, trial.speeds, trial.limits, *earlier).makespan;
        CHECK(end < below);
        CHECK(!(Time{least.load + 2, least.speed} < end));
      } else {
        CHECK(!(Time{least.load + 2, least.speed} < below));
      }
    }
  }
}

/// Of the cuts that end as early, nearly the one that costs least in all.
void the_total_is_near_the_least() {
  draw::Engine engine(3);
  for (const std::int64_t kinds_of_speed : {1, 2, 3}) {
    double excess = 0.0;
    int trials = 0;
    for (int round = 0; round < 600; ++round) {
      Trial trial(engine, round % 2 == 0 ? 0 : 3, kinds_of_speed);
      if (trial.limits.counts.most - trial.limits.counts.least <= 1) {
        continue;
      }
      const auto shares = one_batch_each(trial.step, trial.speeds, trial.limits);
      if (shares) {
        const Found found = check_shares(trial.step, trial.speeds, trial.limits, *shares);
        const double least = ByTrying(trial.step, trial.speeds, trial.limits).least_total(found.makespan);
        CHECK(found.total >= least * (1.0 - 1e-12));
        excess += least > 0.0 ? found.total / least - 1.0 : 0.0;
        ++trials;
      }
    }
    CHECK(excess / trials < (kinds_of_speed == 1 ? 0.01 : 0.05));
  }
}

/// More orders of the speeds than can be tried: still complete and within the limits, and never below the bound.
void many_speeds_fall_back() {
  draw::Engine engine(4);
  for (const std::int64_t ranks : {13, 40, 200}) {
    std::vector<double> given(static_cast<std::size_t>(ranks));
    std::iota(given.begin(), given.end(), 20.0);
    const Speeds speeds(given);
    for (int kind = 0; kind < draw::kKinds; ++kind) {
      const auto sizes = draw::sizes(engine, 10 * ranks, kind);
      const Step step = draw::padded(sizes, 3.0, ranks);
      const std::vector<double> capacity(given.size(), step.size.front() * static_cast<double>(4 * ranks));
      for (const std::int64_t least : {1, 2, 10}) {
        const Limits limits{{least, 10 * ranks - least * (ranks - 1)}, 1, capacity};
        const auto shares = one_batch_each(step, speeds, limits);
        CHECK(shares.has_value());
        if (shares) {
          const Found found = check_shares(step, speeds, limits, *shares);
          CHECK(!(found.makespan < chronica::lower_bound(step, speeds, limits.counts, 1, capacity.front())));
          const auto earlier = one_batch_each(step, speeds, limits, found.makespan);
          CHECK(!earlier || check_shares(step, speeds, limits, *earlier).makespan < found.makespan);
        }
      }
    }
  }
}

void ranks_of_any_ratio_of_speeds() {
  draw::Engine engine(5);
  for (const double slow : {0x1p-20, 0x1p-30, 0x1p-40, 1e-300}) {
    for (int kind = 0; kind < draw::kKinds; ++kind) {
      const auto sizes = draw::sizes(engine, 9, kind);
      const Step step = draw::padded(sizes, 1.0, 3);
      const Speeds speeds(std::array{slow, 1.0, 1.0});
      const std::array capacity{kUnlimited, kUnlimited, kUnlimited};
      const Limits limits{{1, 7}, 1, capacity};
      const auto shares = one_batch_each(step, speeds, limits);
      const auto best = ByTrying(step, speeds, limits).least_makespan();
      CHECK(shares && is_least(check_shares(step, speeds, limits, *shares).makespan, *best));
    }
  }
}

}  // namespace

int main() {
  the_makespan_is_the_least();
  nothing_ends_later_than_asked_for();
  the_total_is_near_the_least();
  many_speeds_fall_back();
  ranks_of_any_ratio_of_speeds();
  return failures;
}
