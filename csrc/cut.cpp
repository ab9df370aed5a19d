#include "cut.hpp"

#include <algorithm>
#include <cstddef>
#include <numeric>

namespace chronica {
namespace {

/// A cut of the sorted samples: what it costs, and how many batches it has.
struct CutCost {
  std::int64_t cost = 0;
  std::int64_t batches = 0;
};

/// A batch that begins at sample `first`: ending before sample x it costs intercept + slope · x.
struct Line {
  std::int64_t slope;
  std::int64_t intercept;
  std::int64_t batches;

  [[nodiscard]] std::int64_t at(std::int64_t x) const noexcept { return intercept + slope * x; }
};

/// Whether `middle` is nowhere the lowest of three lines of falling slope.
bool is_hidden(const Line& before, const Line& middle, const Line& after) noexcept {
  return Wide{after.intercept - before.intercept} * (before.slope - middle.slope) <=
         Wide{middle.intercept - before.intercept} * (before.slope - after.slope);
}

/// The cheapest cut when every batch costs `price` besides its samples, prices included. The transitions of the dynamic
/// programme are lines of falling slope asked at rising places: a monotone lower hull, linear in the samples.
CutCost cut_at_price(const Step& step, std::int64_t price, std::vector<Line>& hull) {
  hull.clear();
  std::size_t lowest = 0;
  CutCost best;
  for (std::int64_t end = 1; end <= step.samples(); ++end) {
    const std::int64_t first = end - 1;
    const std::int64_t slope = step.cost[static_cast<std::size_t>(first)];
    const Line line{slope, best.cost + price - first * slope, best.batches + 1};
    while (hull.size() >= lowest + 2 && is_hidden(hull[hull.size() - 2], hull.back(), line)) {
      hull.pop_back();
    }
    hull.push_back(line);
    while (lowest + 1 < hull.size() && hull[lowest + 1].at(end) <= hull[lowest].at(end)) {
      ++lowest;
    }
    best = {hull[lowest].at(end), hull[lowest].batches};
  }
  return best;
}

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
/// Reaching further is never worse (what is left is smaller), so this is exact. With too many states only the order
/// fastest first is tried.
class Cutter {
 public:
  Cutter(const Step& step, const Speeds& speeds, CountRange counts)
      : step_(step), speeds_(speeds), counts_(counts), classes_(group_by_speed(speeds)) {
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

  /// The least makespan, as a load of the fastest rank, with its shares.
  Shares solve() {
    // Everybody can take `most` samples within the upper end, so it is feasible; the search starts near the mean.
    const Wide all = Wide{step_.fixed} + Wide{counts_.most} * step_.cost.front();
    const Wide certain = all * speeds_.fastest() / speeds_.slowest() + 1;
    Wide feasible = std::accumulate(step_.cost.begin(), step_.cost.end(), std::int64_t{0}) / speeds_.ranks() + 1;
    Wide infeasible = -1;
    while (feasible < certain && !fits(feasible)) {
      infeasible = feasible;
      feasible = std::min(feasible * 2, certain);
    }
    while (feasible - infeasible > 1) {
      const Wide middle = infeasible + (feasible - infeasible) / 2;
      (fits(middle) ? feasible : infeasible) = middle;
    }
    fits(feasible);
    return shares();
  }

 private:
  static constexpr std::size_t kMostStates = 4096;

  /// The load that a rank of this speed may carry when the fastest rank may carry `makespan`.
  [[nodiscard]] std::int64_t capacity(Wide makespan, std::int64_t speed) const noexcept {
    constexpr Wide most = std::int64_t{1} << 62;
    return static_cast<std::int64_t>(std::min(makespan * speed / speeds_.fastest(), most));
  }

  /// How many samples from `first` on fit a capacity; 0 where fewer than `least` do. Leaves `least` for each later
  /// rank.
  [[nodiscard]] std::int64_t take(std::int64_t first, std::int64_t capacity, std::int64_t ranks_after) const noexcept {
    const std::int64_t room = capacity - step_.fixed;
    if (room < 0) {
      return 0;
    }
    const std::int64_t size = step_.cost[static_cast<std::size_t>(first)];
    std::int64_t count = std::min(counts_.most, step_.samples() - first - counts_.least * ranks_after);
    if (size > 0) {
      count = std::min(count, room / size);
    }
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
      for (std::size_t c = 0; c < classes_.size(); ++c) {
        if (used(state, c) > 0) {
          extend(state, state - strides_[c], c);
        }
      }
    }
    return reach_.back() == step_.samples();
  }

  /// Let one more rank of class `c` take its samples after the ranks of state `before`.
  void extend(std::size_t state, std::size_t before, std::size_t c) {
    if (reach_[before] == kUnreachable) {
      return;
    }
    std::int64_t ranks_after = speeds_.ranks();
    for (std::size_t each = 0; each < classes_.size(); ++each) {
      ranks_after -= static_cast<std::int64_t>(used(state, each));
    }
    const std::int64_t count = take(reach_[before], capacity_[c], ranks_after);
    if (count > 0 && reach_[before] + count > reach_[state]) {
      reach_[state] = reach_[before] + count;
      choice_[state] = c;
    }
  }

  bool fits_in_order(Wide makespan) {
    reach_[0] = 0;
    for (std::size_t place = 1; place < reach_.size(); ++place) {
      const std::int64_t speed = speeds_[speeds_.fastest_first()[place - 1]];
      const auto ranks_after = static_cast<std::int64_t>(reach_.size() - 1 - place);
      const std::int64_t count = take(reach_[place - 1], capacity(makespan, speed), ranks_after);
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

  [[nodiscard]] Shares shares() const {
    Shares result(static_cast<std::size_t>(speeds_.ranks()));
    const auto give = [&](std::int64_t rank, std::int64_t first, std::int64_t end) {
      auto& share = result[static_cast<std::size_t>(rank)];
      share.resize(static_cast<std::size_t>(end - first));
      std::iota(share.begin(), share.end(), first);
    };
    std::size_t state = reach_.size() - 1;
    while (state > 0) {
      std::size_t before = state - 1;
      std::int64_t rank = 0;
      if (fixed_order_) {
        rank = speeds_.fastest_first()[before];
      } else {
        const std::size_t c = choice_[state];
        before = state - strides_[c];
        rank = classes_[c].ranks[used(before, c)];
      }
      give(rank, reach_[before], reach_[state]);
      state = before;
    }
    return result;
  }

  static constexpr std::int64_t kUnreachable = -1;

  const Step& step_;
  const Speeds& speeds_;
  CountRange counts_;
  std::vector<SpeedClass> classes_;
  std::vector<std::size_t> strides_;
  std::vector<std::int64_t> capacity_;  // (classes)
  std::vector<std::int64_t> reach_;     // (states), the furthest end
  std::vector<std::size_t> choice_;     // (states), the class that took its samples last
  bool fixed_order_ = false;
};

}  // namespace

std::int64_t cheapest_cut(const Step& step, std::int64_t batches) {
  // Every price bounds the cost of a cut into at most `batches` from below by what it makes the cheapest cut cost, less
  // the price of `batches` (Lagrange); by convexity one of the prices around the turning point is exact.
  std::vector<Line> hull;
  std::int64_t bound = 0;
  std::int64_t too_low = -1;
  std::int64_t high_enough = step.samples() * step.cost.front();
  std::int64_t price = 0;
  while (high_enough - too_low > 1) {
    const CutCost cut = cut_at_price(step, price, hull);
    bound = std::max(bound, static_cast<std::int64_t>(Wide{cut.cost} - Wide{price} * batches));
    if (cut.batches == batches || (price == 0 && cut.batches < batches)) {
      break;
    }
    (cut.batches > batches ? too_low : high_enough) = price;
    price = too_low + (high_enough - too_low) / 2;
  }
  return bound;
}

Shares cut_padded(const Step& step, const Speeds& speeds, CountRange counts) {
  return Cutter(step, speeds, counts).solve();
}

}  // namespace chronica
