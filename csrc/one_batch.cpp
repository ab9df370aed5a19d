#include "one_batch.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <numeric>
#include <vector>

#include "capacity.hpp"

namespace chronica {
namespace {

/// Ranks of one speed, by number.
struct SpeedClass {
  std::int64_t speed;
  std::vector<std::int64_t> ranks;
};

std::vector<SpeedClass> group_by_speed(const Speeds& speeds) {
  std::vector<SpeedClass> classes;
  for (const std::int64_t rank : speeds.fastest_first()) {
    if (classes.empty() || classes.back().speed != speeds[rank]) {
      classes.push_back({speeds[rank], {}});
    }
    classes.back().ranks.push_back(rank);
  }
  return classes;
}

/// Finds the order of the ranks along the size-sorted samples, and their counts, that keep a given makespan.
///
/// A state is how many ranks of each speed have taken their samples; it remembers the furthest sample they can reach.
/// Reaching further is never worse (what is left is smaller), so this is exact. With too many states a fixed order is
/// tried, fastest first, and improved by exchanges.
class OneBatchEach {
 public:
  OneBatchEach(const Step& step, const Speeds& speeds, const Limits& limits)
      : step_(step),
        speeds_(speeds),
        limits_(limits),
        counts_(limits.counts),
        classes_(group_by_speed(speeds)),
        order_(speeds.fastest_first()) {
    std::size_t states = 1;
    for (const SpeedClass& each : classes_) {
      strides_.push_back(states);
      states *= each.ranks.size() + 1;
      if (states > kMostStates) {
        fixed_order_ = true;
        states = static_cast<std::size_t>(speeds.ranks()) + 1;
        break;
      }
    }
    reach_.resize(states);
    choice_.resize(states);
  }

  /// The shares of least makespan; nothing if the limits allow none that ends before `below`.
  std::optional<Shares> solve(std::optional<Time> below) {
    // Makespans are loads of the fastest rank. Within the upper end everybody can take `most` samples; the search
    // starts near the mean.
    const Wide all = Wide{step_.fixed} + Wide{counts_.most} * step_.cost.front();
    Wide certain = all * speeds_.fastest() / speeds_.slowest() + 1;
    if (below && below->load == 0) {
      return std::nullopt;
    }
    if (below) {
      certain = std::min(certain, (Wide{below->load} * speeds_.fastest() - 1) / below->speed);
    }
    if (!fits(certain)) {
      return std::nullopt;
    }
    Wide trial = std::accumulate(step_.cost.begin(), step_.cost.end(), std::int64_t{0}) / speeds_.ranks() + 1;
    Wide infeasible = -1;
    while (trial < certain && !fits(trial)) {
      infeasible = trial;
      trial *= 2;
    }
    fits(std::min(trial, certain));
    std::vector<RankRun> runs = found();
    Wide feasible = makespan(runs);
    narrow(infeasible, feasible, runs);
    if (fixed_order_) {
      improve_order(feasible, runs);
    }
    if (counts_.least < counts_.most) {
      level(runs, feasible);
    }
    return shares(runs);
  }

 private:
  static constexpr std::size_t kMostStates = 512;

  /// The load that a rank of this speed may carry when the fastest rank may carry `makespan`.
  [[nodiscard]] std::int64_t capacity(Wide makespan, std::int64_t speed) const noexcept {
    constexpr std::int64_t most = std::int64_t{1} << 62;
    if (makespan >= Wide{most} * speeds_.fastest() / speed) {
      return most;  // what a slow rank needs may be too long to be multiplied by a high speed
    }
    return static_cast<std::int64_t>(makespan * speed / speeds_.fastest());
  }

  /// How many samples from `first` on fit a capacity; 0 where fewer than `least` do. Leaves `least` for each later
  /// rank.
  [[nodiscard]] std::int64_t take(std::int64_t first, std::int64_t rank, std::int64_t capacity,
                                  std::int64_t ranks_after) const noexcept {
    const std::int64_t room = capacity - step_.fixed;
    if (room < 0) {
      return 0;
    }
    const std::int64_t cost = step_.cost[static_cast<std::size_t>(first)];
    std::int64_t count = std::min(counts_.most, step_.samples() - first - counts_.least * ranks_after);
    if (cost > 0) {
      count = std::min(count, room / cost);
    }
    count = most_within(limits_.capacity[static_cast<std::size_t>(rank)], step_.size[static_cast<std::size_t>(first)],
                        count);
    return count >= counts_.least ? count : 0;
  }

  bool fits(Wide makespan) {
    capacity_.clear();
    if (fixed_order_) {
      return fits_in_order(makespan);
    }
    for (const SpeedClass& each : classes_) {
      capacity_.push_back(capacity(makespan, each.speed));
    }
    reach_[0] = 0;
    for (std::size_t state = 1; state < reach_.size(); ++state) {
      reach_[state] = kUnreachable;
      std::int64_t ranks_after = speeds_.ranks();
      for (std::size_t c = 0; c < classes_.size(); ++c) {
        ranks_after -= static_cast<std::int64_t>(used(state, c));
      }
      for (std::size_t c = 0; c < classes_.size(); ++c) {
        if (used(state, c) > 0) {
          extend(state, state - strides_[c], c, ranks_after);
        }
      }
    }
    return reach_.back() == step_.samples();
  }

  /// Let one more rank of class `c` take its samples after the ranks of state `before`.
  void extend(std::size_t state, std::size_t before, std::size_t c, std::int64_t ranks_after) {
    if (reach_[before] == kUnreachable) {
      return;
    }
    const std::int64_t count = take(reach_[before], classes_[c].ranks.front(), capacity_[c], ranks_after);
    if (count > 0 && reach_[before] + count > reach_[state]) {
      reach_[state] = reach_[before] + count;
      choice_[state] = c;
    }
  }

  bool fits_in_order(Wide makespan) {
    reach_[0] = 0;
    for (std::size_t place = 1; place < reach_.size(); ++place) {
      const std::int64_t rank = order_[place - 1];
      const auto ranks_after = static_cast<std::int64_t>(reach_.size() - 1 - place);
      const std::int64_t count = take(reach_[place - 1], rank, capacity(makespan, speeds_[rank]), ranks_after);
      if (count == 0) {
        return false;
      }
      reach_[place] = reach_[place - 1] + count;
    }
    return reach_.back() == step_.samples();
  }

  /// How many ranks of class `c` have their samples in this state: a digit of its mixed-radix number.
  [[nodiscard]] std::size_t used(std::size_t state, std::size_t c) const noexcept {
    return state / strides_[c] % (classes_[c].ranks.size() + 1);
  }

  /// The samples of a rank: a run of the sorted step.
  struct RankRun {
    std::int64_t rank;
    std::int64_t first;
    std::int64_t end;
  };

  /// The runs of the makespan that was found to fit last, along the sorted step.
  [[nodiscard]] std::vector<RankRun> found() const {
    std::vector<RankRun> runs;
    std::size_t state = reach_.size() - 1;
    while (state > 0) {
      std::size_t before = state - 1;
      std::int64_t rank = 0;
      if (fixed_order_) {
        rank = order_[before];
      } else {
        const std::size_t c = choice_[state];
        before = state - strides_[c];
        rank = classes_[c].ranks[used(before, c)];
      }
      runs.push_back({rank, reach_[before], reach_[state]});
      state = before;
    }
    std::reverse(runs.begin(), runs.end());
    return runs;
  }

  /// Find the least makespan between one that does not fit and one that does, with the runs given.
  void narrow(Wide infeasible, Wide& feasible, std::vector<RankRun>& runs) {
    // By turns the middle, which halves what is in question, and just below the best found: nothing there proves it.
    for (bool halves = true; feasible - infeasible > 1; halves = !halves) {
      const Wide trial = halves ? infeasible + (feasible - infeasible) / 2 : feasible - 1;
      if (fits(trial)) {
        runs = found();
        feasible = makespan(runs);
      } else {
        infeasible = trial;
      }
    }
  }

  /// Change two ranks of the fixed order for each other, or move one to another place, wherever that ends the step
  /// earlier.
  void improve_order(Wide& feasible, std::vector<RankRun>& runs) {
    const auto try_order = [&](std::vector<std::int64_t>&& changed) {
      order_.swap(changed);
      if (!fits(feasible - 1)) {
        order_.swap(changed);
        return false;
      }
      runs = found();
      feasible = makespan(runs);
      narrow(feasible - feasible / 16, feasible, runs);
      return true;
    };
    constexpr int kMostRounds = 16;
    bool better = true;
    for (int round = 0; round < kMostRounds && better; ++round) {
      better = false;
      for (std::size_t i = 0; i < order_.size(); ++i) {
        for (std::size_t j = 0; j < order_.size(); ++j) {
          if (i < j) {
            std::vector<std::int64_t> swapped = order_;
            std::swap(swapped[i], swapped[j]);
            better = try_order(std::move(swapped)) || better;
          }
          if (i != j) {
            std::vector<std::int64_t> moved = order_;
            moved.erase(moved.begin() + static_cast<std::ptrdiff_t>(i));
            moved.insert(moved.begin() + static_cast<std::ptrdiff_t>(j), order_[i]);
            better = try_order(std::move(moved)) || better;
          }
        }
      }
    }
  }

  /// The least load of the fastest rank at which these runs fit.
  [[nodiscard]] Wide makespan(const std::vector<RankRun>& runs) const {
    Wide longest = 0;
    for (const RankRun& run : runs) {
      const Wide load = step_.fixed + (run.end - run.first) * step_.cost[static_cast<std::size_t>(run.first)];
      const std::int64_t speed = speeds_[run.rank];
      longest = std::max(longest, (load * speeds_.fastest() + speed - 1) / speed);
    }
    return longest;
  }

  /// Move the borders between neighbouring runs where that lowers the total load, or evens counts at no cost, while
  /// everybody still ends by `makespan`.
  void level(std::vector<RankRun>& runs, Wide makespan) const {
    constexpr int kMostRounds = 8;
    bool moved = true;
    for (int round = 0; round < kMostRounds && moved; ++round) {
      moved = false;
      for (std::size_t i = 0; i + 1 < runs.size(); ++i) {
        const std::int64_t border = best_border(runs[i], runs[i + 1], makespan);
        moved = moved || border != runs[i].end;
        runs[i].end = runs[i + 1].first = border;
      }
    }
  }

  [[nodiscard]] std::int64_t best_border(const RankRun& left, const RankRun& right, Wide makespan) const {
    const std::int64_t left_cost = step_.cost[static_cast<std::size_t>(left.first)];
    // Summed loads ÷ speeds, both multiplied by the two speeds.
    const auto total = [&](std::int64_t border) {
      return Wide{(border - left.first) * left_cost} * speeds_[right.rank] +
             Wide{(right.end - border) * step_.cost[static_cast<std::size_t>(border)]} * speeds_[left.rank];
    };
    const auto unevenness = [&](std::int64_t border) { return std::abs(2 * border - left.first - right.end); };
    std::int64_t best = left.end;
    for (std::int64_t border = left.first + counts_.least; border <= right.end - counts_.least; ++border) {
      const Wide difference = total(border) - total(best);
      if ((difference < 0 || (difference == 0 && unevenness(border) < unevenness(best))) &&
          is_allowed({left.rank, left.first, border}, makespan) &&
          is_allowed({right.rank, border, right.end}, makespan)) {
        best = border;
      }
    }
    return best;
  }

  [[nodiscard]] bool is_allowed(const RankRun& run, Wide makespan) const {
    const std::int64_t count = run.end - run.first;
    return count <= counts_.most &&
           is_within(limits_.capacity[static_cast<std::size_t>(run.rank)],
                     step_.size[static_cast<std::size_t>(run.first)], count) &&
           step_.fixed + count * step_.cost[static_cast<std::size_t>(run.first)] <=
               capacity(makespan, speeds_[run.rank]);
  }

  [[nodiscard]] Shares shares(const std::vector<RankRun>& runs) const {
    Shares result(static_cast<std::size_t>(speeds_.ranks()));
    for (const RankRun& run : runs) {
      Share& share = result[static_cast<std::size_t>(run.rank)];
      share.resize(static_cast<std::size_t>(run.end - run.first));
      std::iota(share.begin(), share.end(), run.first);
    }
    return result;
  }

  static constexpr std::int64_t kUnreachable = -1;

  const Step& step_;
  const Speeds& speeds_;
  const Limits& limits_;
  CountRange counts_;
  std::vector<SpeedClass> classes_;
  std::vector<std::size_t> strides_;
  std::vector<std::int64_t> capacity_;  // (classes)
  std::vector<std::int64_t> reach_;     // (states), the furthest end
  std::vector<std::size_t> choice_;     // (states), the class that took its samples last
  bool fixed_order_ = false;
  std::vector<std::int64_t> order_;  // (ranks), along the sorted step where it is fixed
};

}  // namespace

std::optional<Shares> one_batch_each(const Step& step, const Speeds& speeds, const Limits& limits,
                                     std::optional<Time> below) {
  return OneBatchEach(step, speeds, limits).solve(below);
}

}  // namespace chronica
