#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <vector>

namespace chronica {

/// The samples from the cheapest to the dearest; of equal cost in drawn order.
inline std::vector<std::int64_t> ascending(std::span<const double> costs) {
  const auto cost = [costs](std::int64_t sample) { return costs[static_cast<std::size_t>(sample)]; };
  std::vector<std::int64_t> order(costs.size());
  std::iota(order.begin(), order.end(), std::int64_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::int64_t a, std::int64_t b) { return cost(a) < cost(b); });
  return order;
}

/// The samples that nobody has taken yet. A sample's place is where it stands in ascending order.
class Remaining {
 public:
  explicit Remaining(std::span<const double> costs)
      : sample_(ascending(costs)), cost_(costs.size()), onward_(costs.size() + 1), before_(costs.size() + 1) {
    for (std::size_t place = 0; place < places(); ++place) {
      cost_[place] = costs[static_cast<std::size_t>(sample_[place])];
      before_[place + 1] = place;
    }
    std::iota(onward_.begin(), onward_.end(), std::size_t{0});
    before_[0] = places();
  }

  [[nodiscard]] std::size_t places() const noexcept { return sample_.size(); }
  [[nodiscard]] bool holds(std::size_t place) const noexcept { return onward_[place] == place; }

  /// The cost at a place, taken or not.
  [[nodiscard]] double cost(std::size_t place) const noexcept { return cost_[place]; }
  /// The sample at a place, as an index into the costs given.
  [[nodiscard]] std::int64_t sample(std::size_t place) const noexcept { return sample_[place]; }

  /// The place of nearest cost, while anything remains: equidistant, the dearer; of equal cost, the first drawn.
  [[nodiscard]] std::size_t nearest(double target) {
    const std::size_t above = first_from(place_of(target));
    const std::size_t below = before_[above];
    if (below == places() || (above != places() && cost_[above] - target <= target - cost_[below])) {
      return above;
    }
    return first_from(place_of(cost_[below]));
  }

  void take(std::size_t place) {
    const std::size_t after = first_from(place + 1);
    before_[after] = before_[place];
    onward_[place] = after;
  }

 private:
  /// The first place, taken or not, that does not cost less.
  [[nodiscard]] std::size_t place_of(double cost) const {
    return static_cast<std::size_t>(std::lower_bound(cost_.begin(), cost_.end(), cost) - cost_.begin());
  }

  /// The first place from `place` on that is not taken, or the end. Halves the way it goes, so that no way stays long.
  [[nodiscard]] std::size_t first_from(std::size_t place) {
    while (onward_[place] != place) {
      onward_[place] = onward_[onward_[place]];
      place = onward_[place];
    }
    return place;
  }

  std::vector<std::int64_t> sample_;  // (places)
  std::vector<double> cost_;          // (places), ascending
  std::vector<std::size_t> onward_;   // (places + 1), itself if not taken, else a later place; the end is never taken
  std::vector<std::size_t> before_;   // (places + 1), of a place not taken: the one before it; the end if there is none
};

}  // namespace chronica
