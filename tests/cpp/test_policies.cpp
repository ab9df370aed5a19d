#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <limits>
#include <numeric>
#include <random>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "check.hpp"
#include "nearest.hpp"
#include "policies.hpp"

namespace {

using chronica::deal;
using chronica::Policy;
using chronica::Pool;
using chronica::Remaining;

using Order = std::vector<std::int64_t>;

constexpr Policy kAll[] = {Policy::kStatic, Policy::kDynamic, Policy::kGuided};

/// The policies once more, by looking at every sample each time: one step after the other as the text of them goes.
class Reference {
 public:
  Reference(Policy policy, const Pool& pool) : policy_(policy), pool_(pool), engine_(pool.seed) {
    left_.resize(pool.costs.size());
    std::iota(left_.begin(), left_.end(), std::int64_t{0});
    if (policy == Policy::kDynamic) {
      Order ascending = left_;
      std::stable_sort(ascending.begin(), ascending.end(),
                       [this](std::int64_t a, std::int64_t b) { return cost(a) < cost(b); });
      for (const std::int64_t place : shuffled(std::ssize(left_))) {
        pivots_.push_back(ascending[static_cast<std::size_t>(place)]);
      }
    }
  }

  Order deal() {
    std::vector<Order> whole;
    Order last;
    while (!left_.empty()) {
      const std::int64_t samples = std::min(pool_.global_batch, std::ssize(left_));
      (samples == pool_.global_batch ? whole.emplace_back() : last) = deal_step(samples);
    }
    Order dealt;
    for (const std::int64_t step : shuffled(std::ssize(whole))) {
      const Order& order = whole[static_cast<std::size_t>(step)];
      dealt.insert(dealt.end(), order.begin(), order.end());
    }
    dealt.insert(dealt.end(), last.begin(), last.end());
    return dealt;
  }

 private:
  [[nodiscard]] double cost(std::int64_t sample) const { return pool_.costs[static_cast<std::size_t>(sample)]; }

  Order shuffled(std::int64_t count) {
    Order order(static_cast<std::size_t>(count));
    std::iota(order.begin(), order.end(), std::int64_t{0});
    for (auto left = static_cast<std::uint64_t>(count); left > 1; --left) {
      std::swap(order[left - 1], order[engine_() % left]);
    }
    return order;
  }

  double take(std::vector<std::int64_t>& share, std::int64_t sample) {
    left_.erase(std::find(left_.begin(), left_.end(), sample));
    share.push_back(sample);
    return cost(sample);
  }

  /// Nearest, then dearest, then first drawn.
  [[nodiscard]] std::int64_t nearest(double target) const {
    return *std::min_element(left_.begin(), left_.end(), [&](std::int64_t a, std::int64_t b) {
      const double distance_a = std::abs(cost(a) - target);
      const double distance_b = std::abs(cost(b) - target);
      return distance_a < distance_b || (distance_a == distance_b && cost(a) > cost(b));
    });
  }

  [[nodiscard]] std::int64_t pivot() const {
    return *std::find_if(pivots_.begin(), pivots_.end(), [this](std::int64_t sample) {
      return std::find(left_.begin(), left_.end(), sample) != left_.end();
    });
  }

  Order deal_step(std::int64_t samples) {
    const std::int64_t ranks = std::ssize(pool_.speeds);
    std::vector<Order> shares(static_cast<std::size_t>(ranks));
    std::vector<std::size_t> counts;
    for (std::int64_t rank = 0; rank < ranks; ++rank) {
      counts.push_back(static_cast<std::size_t>(samples / ranks + (rank < samples % ranks ? 1 : 0)));
    }
    if (policy_ == Policy::kDynamic) {
      fill_dynamic(shares, counts);
    } else {
      fill_in_turn(shares, counts);
    }
    Order step;
    for (const Order& share : shares) {
      step.insert(step.end(), share.begin(), share.end());
    }
    return step;
  }

  void fill_in_turn(std::vector<Order>& shares, const std::vector<std::size_t>& counts) {
    const double total = std::accumulate(pool_.costs.begin(), pool_.costs.end(), 0.0);
    const double local = static_cast<double>(pool_.global_batch / std::ssize(pool_.speeds));
    const double mean = total / static_cast<double>(pool_.costs.size()) * local;
    const bool is_whole =
        std::none_of(pool_.costs.begin(), pool_.costs.end(), [](double cost) { return std::fmod(cost, 1.0) != 0.0; });
    const double capacity = is_whole ? std::round(mean) : mean;
    for (std::size_t rank = 0; rank < shares.size(); ++rank) {
      double load = 0.0;
      while (shares[rank].size() < counts[rank]) {
        const double target = policy_ == Policy::kStatic ? capacity - load : 0.0;
        load += take(shares[rank], nearest(target));
      }
    }
  }

  void fill_dynamic(std::vector<Order>& shares, const std::vector<std::size_t>& counts) {
    const double fixed = pool_.fixed_cost;
    std::vector<double> sums(shares.size(), 0.0);
    const auto load = [&](std::size_t rank) { return (fixed + sums[rank]) / pool_.speeds[rank]; };

    sums[0] = take(shares[0], pivot());
    double longest = load(0);
    for (std::size_t rank = 1; rank < shares.size() && counts[rank] > 0; ++rank) {
      const double speed = pool_.speeds[rank];
      sums[rank] = take(shares[rank], nearest(longest * speed - fixed));
      longest = std::max(longest, load(rank));
    }
    for (std::size_t round = 1; round < counts[0]; ++round) {
      for (std::size_t rank = 0; rank < shares.size() && round < counts[rank]; ++rank) {
        sums[rank] += take(shares[rank], nearest((longest - load(rank)) * pool_.speeds[rank]));
        longest = std::max(longest, load(rank));
      }
    }
  }

  Policy policy_;
  const Pool& pool_;
  std::mt19937_64 engine_;
  Order left_;    // in drawn order
  Order pivots_;  // dynamic: the order in which first samples are drawn
};

bool is_permutation(Order order) {
  std::sort(order.begin(), order.end());
  for (std::size_t i = 0; i < order.size(); ++i) {
    if (order[i] != static_cast<std::int64_t>(i)) {
      return false;
    }
  }
  return true;
}

void check_pool(const Pool& pool) {
  for (const Policy policy : kAll) {
    const Order dealt = deal(policy, pool);
    CHECK(dealt.size() == pool.costs.size());
    CHECK(is_permutation(dealt));
    CHECK(dealt == deal(policy, pool));
    CHECK(dealt == Reference(policy, pool).deal());
  }
}

/// The reference forms its targets in another way: equal to the last bit for whole costs if the speeds are powers of
/// two; else a last bit may differ, which shows only if two samples are equally near.
void against_reference() {
  std::mt19937_64 engine(11);
  std::lognormal_distribution<double> heavy(4.0, 1.0);
  for (const std::int64_t ranks : {1, 2, 3, 8, 33}) {
    std::vector<double> even(static_cast<std::size_t>(ranks), 1.0);
    std::vector<double> uneven = even;
    for (std::size_t rank = 0; rank < uneven.size(); ++rank) {
      uneven[rank] = std::ldexp(1.0, static_cast<int>(rank % 3) - 1);
    }
    std::vector<double> any = even;
    std::generate(any.begin(), any.end(), [&] { return heavy(engine); });
    for (const std::int64_t samples : {0, 1, 2, 7, 32, 65, 199}) {
      const auto size = static_cast<std::size_t>(samples);
      std::vector<std::vector<double>> pools = {std::vector<double>(size, 0.0), std::vector<double>(size, 7.0)};
      std::vector<double> costs(size);
      std::generate(costs.begin(), costs.end(), [&] { return heavy(engine); });
      check_pool({costs, 55.5, any, ranks * 3, engine()});
      std::transform(costs.begin(), costs.end(), costs.begin(), [](double cost) { return std::ceil(cost); });
      pools.push_back(costs);
      std::generate(costs.begin(), costs.end(), [&] { return static_cast<double>(engine() % 4); });
      pools.push_back(costs);
      if (size > 0) {
        costs[engine() % size] = std::ldexp(1.0, 40);
        pools.push_back(costs);
      }
      for (const std::vector<double>& pool : pools) {
        for (const std::int64_t per_rank : {1, 2, 5}) {
          check_pool({pool, 0.0, even, ranks * per_rank, engine()});
          check_pool({pool, 13.0, uneven, ranks * per_rank, engine()});
        }
      }
    }
  }
}

void nearest_sample() {
  const std::vector<double> costs = {5.0, 1.0, 9.0, 5.0, 1.0, 9.0};
  Remaining remaining(costs);
  const auto take = [&remaining](double target) {
    const std::size_t place = remaining.nearest(target);
    CHECK(remaining.holds(place));
    remaining.take(place);
    CHECK(!remaining.holds(place));
    return remaining.sample(place);
  };
  CHECK(take(7.0) == 2);  // as far from 5 as from 9: the dearer, and of those the first drawn
  CHECK(take(6.9) == 0);
  CHECK(take(-1.0) == 1);
  CHECK(take(3.0) == 3);
  CHECK(take(4.9) == 4);
  CHECK(take(0.0) == 5);
}

/// Worked by hand.
void by_hand() {
  const std::vector<double> costs = {1.0, 2.0, 3.0, 4.0, 5.0, 6.0};
  const std::vector<double> speeds = {1.0, 1.0};
  // Capacity 10.5, rounded away from zero: 11 takes 6, 5 takes 5, 0 takes 1; then 11 takes 4, 7 takes 3, 4 takes 2.
  CHECK((deal(Policy::kStatic, {costs, 0.0, speeds, 6, 1}) == Order{5, 4, 0, 3, 2, 1}));
  CHECK((deal(Policy::kGuided, {costs, 0.0, speeds, 6, 1}) == Order{0, 1, 2, 3, 4, 5}));

  // Rank 1 first takes the other one of the pivot's cost; then, of two alike, what rank 0 has just taken.
  const std::vector<double> pairs = {8.0, 3.0, 8.0, 3.0};
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    const Order dealt = deal(Policy::kDynamic, {pairs, 2.0, speeds, 4, seed});
    CHECK(dealt[0] % 2 != dealt[1] % 2);
    CHECK(dealt[2] % 2 == dealt[0] % 2);
  }

  // Half the speed, half the cost: the target of the second rank is 10 · 0.5 − 2 = 3, or (3 + 2) · 0.5 − 2 = 0.5.
  const std::vector<double> slower = {1.0, 0.5};
  const std::vector<double> four = {8.0, 3.0, 1.0, 100.0};
  bool seen_8 = false;
  for (std::uint64_t seed = 0; seed < 40; ++seed) {
    const Order dealt = deal(Policy::kDynamic, {four, 2.0, slower, 4, seed});
    if (dealt[0] == 0) {
      CHECK(dealt[2] == 1);
      seen_8 = true;
    } else if (dealt[0] == 1) {
      CHECK(dealt[2] == 2);
    }
  }
  CHECK(seen_8);
}

/// Over samples, not over sizes: the one dear sample comes first no more often than any other.
void first_sample_is_uniform() {
  std::vector<double> costs(10, 1.0);
  costs[4] = 1000.0;
  const std::vector<double> speeds = {1.0, 1.0};
  std::vector<int> times(costs.size(), 0);
  for (std::uint64_t seed = 0; seed < 10'000; ++seed) {
    ++times[static_cast<std::size_t>(deal(Policy::kDynamic, {costs, 0.0, speeds, 10, seed})[0])];
  }
  CHECK(std::all_of(times.begin(), times.end(), [](int count) { return count > 850 && count < 1150; }));
}

/// Guided builds steps of rising cost, so their order shows; the last, short one has the dearest and stays.
void steps_are_shuffled() {
  std::vector<double> costs(23);
  std::iota(costs.begin(), costs.end(), 0.0);
  const std::vector<double> speeds = {1.0, 1.0};
  std::set<Order> orders;
  for (std::uint64_t seed = 0; seed < 2000; ++seed) {
    const Order dealt = deal(Policy::kGuided, {costs, 0.0, speeds, 4, seed});
    Order steps;
    for (std::size_t i = 0; i < dealt.size(); ++i) {
      CHECK(i % 4 == 0 || dealt[i] == dealt[i - 1] + 1);
      if (i % 4 == 0) {
        steps.push_back(dealt[i] / 4);
      }
    }
    CHECK(steps.back() == 5);
    orders.insert(steps);
  }
  CHECK(orders.size() == 120);  // every order of the five whole steps
}

/// Sums beyond the largest double give useless plans, but plans.
void overflow() {
  const std::vector<double> costs(9, std::numeric_limits<double>::max());
  const std::vector<double> speeds = {1e-300, 1.0, 1e300};
  for (const Policy policy : kAll) {
    CHECK(is_permutation(deal(policy, {costs, std::numeric_limits<double>::max(), speeds, 6, 1})));
  }
}

void a_million() {
  std::mt19937_64 engine(5);
  std::lognormal_distribution<double> heavy(5.0, 1.0);
  std::vector<double> costs(1'000'003);
  std::generate(costs.begin(), costs.end(), [&] { return std::ceil(heavy(engine)); });
  const std::vector<double> speeds(32, 1.0);
  for (const Policy policy : kAll) {
    CHECK(is_permutation(deal(policy, {costs, 10.0, speeds, 256, 1})));
  }
}

}  // namespace

int main() {
  nearest_sample();
  by_hand();
  against_reference();
  first_sample_is_uniform();
  steps_are_shuffled();
  overflow();
  a_million();
  return failures;
}
