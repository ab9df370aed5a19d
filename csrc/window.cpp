// A sample that outweighs a rank's share of its step keeps the other ranks waiting, however the step is split. So the
// window's large samples are gathered in few steps, where they keep each other company: from the largest one down, the
// step that holds it takes further large ones until no rank has to wait. For each it gives a small one, the next in
// drawn order: but for the large samples they lose, the other steps stay as random as they were.

#include "window.hpp"

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <numeric>
#include <utility>

#include "step.hpp"

namespace chronica {
namespace {

/// One of the window's steps.
struct Group {
  std::int64_t total = 0;       // its samples, and the fixed cost of every rank
  std::int64_t largest = 0;     // of its samples that do not wait to be gathered
  std::size_t first_large = 0;  // the largest that does, larger than those: an index into Regrouper::large_, or the end
};

/// A sample that outweighs a rank's share of a step of small ones.
struct Large {
  std::int64_t cost = 0;
  std::int64_t sample = 0;
  std::size_t next_in_step = 0;  // the next smaller one of the same step, or the end
};

/// A large sample that comes into a step, and the small one that it changes places with.
struct Swap {
  std::int64_t large = 0;
  std::int64_t small = 0;
};

class Regrouper {
 public:
  explicit Regrouper(const Window& window)
      : speeds_(window.speeds),
        global_batch_(window.global_batch),
        most_swaps_(static_cast<std::size_t>(window.most_moved / 2)),
        cost_(window.costs.size()),
        groups_(window.costs.size() / static_cast<std::size_t>(window.global_batch)) {
    quantise(window);
    largest_small_ = largest_small();
    collect_large();
    measure_groups();
  }

  /// Fill one step after the other, always the one with the largest sample that still waits.
  void gather() {
    for (std::size_t next = waiting(0); next < large_.size() && !exhausted(); next = waiting(next)) {
      fill(step_of(large_[next].sample));
    }
  }

  /// The drawn order after those swaps that made the steps shortest. No sample is swapped twice.
  [[nodiscard]] std::vector<std::int64_t> order() const {
    std::vector<std::int64_t> result(cost_.size());
    std::iota(result.begin(), result.end(), std::int64_t{0});
    for (std::size_t i = 0; i < worthwhile_swaps_; ++i) {
      std::swap(result[static_cast<std::size_t>(swaps_[i].large)], result[static_cast<std::size_t>(swaps_[i].small)]);
    }
    return result;
  }

 private:
  /// What each rank of a step can take beside what it has until it is as late as the rank of the largest; ascending.
  using Rooms = std::vector<std::int64_t>;

  [[nodiscard]] std::int64_t cost(std::int64_t sample) const { return cost_[static_cast<std::size_t>(sample)]; }
  [[nodiscard]] bool is_small(std::int64_t sample) const { return cost(sample) <= largest_small_; }
  [[nodiscard]] std::int64_t step_of(std::int64_t sample) const { return sample / global_batch_; }
  [[nodiscard]] Group& group(std::int64_t step) { return groups_[static_cast<std::size_t>(step)]; }
  [[nodiscard]] bool exhausted() const { return swaps_.size() == most_swaps_; }

  /// Costs as integers that add up to less than 2^52 over the window.
  void quantise(const Window& window) {
    const double largest = std::max(window.fixed_cost, *std::max_element(window.costs.begin(), window.costs.end()));
    const int exponent = exponent_for(largest, std::ssize(cost_) + std::ssize(groups_) * speeds_.ranks());
    std::transform(window.costs.begin(), window.costs.end(), cost_.begin(),
                   [exponent](double cost) { return scaled(cost, exponent); });
    fixed_ = scaled(window.fixed_cost, exponent);
  }

  /// Up to what cost a sample is small: at most 15/16 of the fastest rank's share in a step of small samples, so that
  /// hardly any such step waits for its largest. At least half of the samples are: for each large one, one to give.
  [[nodiscard]] std::int64_t largest_small() const {
    std::int64_t limit = *std::max_element(cost_.begin(), cost_.end());
    for (std::int64_t next = limit;;) {
      std::int64_t count = 0;
      std::int64_t total = 0;
      for (const std::int64_t cost : cost_) {
        count += cost <= next ? 1 : 0;
        total += cost <= next ? cost : 0;
      }
      if (2 * count < std::ssize(cost_)) {
        return limit;
      }
      limit = next;
      const Wide step = Wide{total} * global_batch_ / count + speeds_.ranks() * fixed_;
      const auto share = static_cast<std::int64_t>(step * speeds_.fastest() / speeds_.sum()) - fixed_;
      if (limit <= share - share / 16) {
        return limit;
      }
      next = std::min(share, limit) / 16 * 15;  // a sixteenth less at least, so that the rounds are few
    }
  }

  /// The samples that are not small, from the largest down, and for each the next one of the same step.
  void collect_large() {
    for (std::int64_t sample = 0; sample < std::ssize(cost_); ++sample) {
      if (!is_small(sample)) {
        large_.push_back({cost(sample), sample});
      }
    }
    std::sort(large_.begin(), large_.end(), [](const Large& a, const Large& b) {
      return a.cost > b.cost || (a.cost == b.cost && a.sample < b.sample);
    });
    next_waiting_.resize(large_.size() + 1);
    std::iota(next_waiting_.begin(), next_waiting_.end(), std::size_t{0});
    for (Group& group : groups_) {
      group.first_large = large_.size();
    }
    for (std::size_t i = large_.size(); i-- > 0;) {
      large_[i].next_in_step = std::exchange(group(step_of(large_[i].sample)).first_large, i);
    }
  }

  void measure_groups() {
    for (std::int64_t step = 0; step < std::ssize(groups_); ++step) {
      group(step).total = speeds_.ranks() * fixed_;
      for (std::int64_t sample = step * global_batch_; sample < (step + 1) * global_batch_; ++sample) {
        group(step).total += cost(sample);
        group(step).largest = std::max(group(step).largest, is_small(sample) ? cost(sample) : 0);
      }
      time_ += time(group(step));
    }
    shortest_ = time_;
  }

  /// The time of the fastest rank with the largest sample, and of all ranks with everything; both times all speeds.
  [[nodiscard]] Wide time_of_largest(const Group& group) const {
    const bool has_large = group.first_large < large_.size();
    return Wide{(has_large ? large_[group.first_large].cost : group.largest) + fixed_} * speeds_.sum();
  }
  [[nodiscard]] Wide time_of_all(const Group& group) const { return Wide{group.total} * speeds_.fastest(); }
  [[nodiscard]] Wide time(const Group& group) const { return std::max(time_of_largest(group), time_of_all(group)); }

  /// The first large sample from index `i` on that still waits, or the end. Halves the way for the next to ask.
  [[nodiscard]] std::size_t waiting(std::size_t i) {
    while (next_waiting_[i] != i) {
      next_waiting_[i] = next_waiting_[next_waiting_[i]];
      i = next_waiting_[i];
    }
    return i;
  }

  [[nodiscard]] std::size_t largest_waiting(std::int64_t at_most) {
    const auto first = std::partition_point(large_.begin(), large_.end(),
                                            [at_most](const Large& large) { return large.cost > at_most; });
    return waiting(static_cast<std::size_t>(first - large_.begin()));
  }

  /// Let a step keep its large samples and take more until its largest keeps nobody waiting: the largest for which some
  /// rank has room, since others would be waited for themselves. Its own go where they leave the widest rooms to
  /// others.
  void fill(std::int64_t step) {
    Group& heavy = group(step);
    heavy.largest = large_[heavy.first_large].cost;
    Rooms rooms = rooms_beside(heavy.largest);
    for (std::size_t i = heavy.first_large; i < large_.size(); i = large_[i].next_in_step) {
      if (waiting(i) == i) {
        const auto tightest = std::lower_bound(rooms.begin(), rooms.end(), large_[i].cost);
        settle(i, rooms, tightest == rooms.end() ? std::prev(tightest) : tightest);
      }
    }
    heavy.first_large = large_.size();

    const std::int64_t end = (step + 1) * global_batch_;
    for (std::int64_t small = step * global_batch_; small < end; ++small) {
      if (!is_small(small)) {
        continue;
      }
      const std::size_t next = largest_waiting(rooms.back());
      if (next == large_.size() || exhausted() || time_of_all(heavy) >= time_of_largest(heavy)) {
        return;
      }
      settle(next, rooms, std::prev(rooms.end()));
      swap({large_[next].sample, small}, heavy);
    }
  }

  [[nodiscard]] Rooms rooms_beside(std::int64_t largest) const {
    Rooms rooms;
    for (const std::int64_t rank : speeds_.fastest_first()) {
      const Wide load = Wide{largest + fixed_} * speeds_[rank] / speeds_.fastest();
      rooms.push_back(static_cast<std::int64_t>(load) - fixed_);
    }
    std::reverse(rooms.begin(), rooms.end());
    return rooms;
  }

  /// A large sample has found its step, and in it the room it takes.
  void settle(std::size_t i, Rooms& rooms, Rooms::iterator room) {
    next_waiting_[i] = i + 1;
    *room -= large_[i].cost;
    std::rotate(std::upper_bound(rooms.begin(), room, *room), room, std::next(room));
  }

  void swap(const Swap& swap, Group& heavy) {
    Group& giver = group(step_of(swap.large));
    time_ -= time(heavy) + time(giver);
    heavy.total += cost(swap.large) - cost(swap.small);
    giver.total -= cost(swap.large) - cost(swap.small);
    giver.largest = std::max(giver.largest, cost(swap.small));
    while (giver.first_large < large_.size() && waiting(giver.first_large) != giver.first_large) {
      giver.first_large = large_[giver.first_large].next_in_step;
    }
    time_ += time(heavy) + time(giver);

    swaps_.push_back(swap);
    if (time_ < shortest_) {
      shortest_ = time_;
      worthwhile_swaps_ = swaps_.size();
    }
  }

  Speeds speeds_;
  std::int64_t global_batch_;
  std::size_t most_swaps_;
  std::int64_t fixed_ = 0;
  std::vector<std::int64_t> cost_;
  std::vector<Group> groups_;
  std::int64_t largest_small_ = 0;
  std::vector<Large> large_;               // (large), from the largest down
  std::vector<std::size_t> next_waiting_;  // (large + 1), itself for one that waits; else one that may, further on
  std::vector<Swap> swaps_;                // in the order in which they were made
  std::size_t worthwhile_swaps_ = 0;       // how many of them
  Wide time_ = 0;                          // of all steps after all swaps
  Wide shortest_ = 0;                      // after the worthwhile ones
};

}  // namespace

std::vector<std::int64_t> regroup(const Window& window) {
  Regrouper regrouper(window);
  regrouper.gather();
  return regrouper.order();
}

}  // namespace chronica
