#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "bounds.hpp"
#include "check.hpp"
#include "cut.hpp"

namespace {

using chronica::CountRange;
using chronica::Speeds;
using chronica::Step;
using chronica::Time;

/// The least Σ n · max over contiguous cuts into at most `batches`, by the quadratic dynamic programme.
std::int64_t cheapest_by_trying(const Step& step, std::int64_t batches) {
  const std::size_t samples = step.cost.size();
  std::vector<std::int64_t> least(samples + 1, std::numeric_limits<std::int64_t>::max() / 2);
  least[0] = 0;
  for (std::int64_t batch = 0; batch < batches; ++batch) {
    std::vector<std::int64_t> next = least;
    for (std::size_t end = 1; end <= samples; ++end) {
      for (std::size_t first = 0; first < end; ++first) {
        next[end] = std::min(next[end], least[first] + static_cast<std::int64_t>(end - first) * step.cost[first]);
      }
    }
    least = next;
  }
  return least[samples];
}

/// The least makespan over all orders of the ranks and all contiguous cuts with allowed counts.
Time best_by_trying(const Step& step, const Speeds& speeds, CountRange counts) {
  std::vector<std::int64_t> order(static_cast<std::size_t>(speeds.ranks()));
  std::iota(order.begin(), order.end(), std::int64_t{0});
  Time best{std::numeric_limits<std::int64_t>::max() / 2, 1};
  const auto extend = [&](const auto& self, std::size_t place, std::int64_t first, const Time& longest) -> void {
    if (place == order.size()) {
      if (first == step.samples()) {
        best = std::min(best, longest);
      }
      return;
    }
    for (std::int64_t count = counts.least; count <= counts.most && first + count <= step.samples(); ++count) {
      const std::int64_t load = step.fixed + count * step.cost[static_cast<std::size_t>(first)];
      self(self, place + 1, first + count, std::max(longest, Time{load, speeds[order[place]]}));
    }
  };
  do {
    extend(extend, 0, 0, Time{0, 1});
  } while (std::next_permutation(order.begin(), order.end()));
  return best;
}

Time makespan(const Step& step, const Speeds& speeds, const chronica::Shares& shares) {
  Time longest{0, 1};
  for (std::int64_t rank = 0; rank < speeds.ranks(); ++rank) {
    const auto& share = shares[static_cast<std::size_t>(rank)];
    const auto count = static_cast<std::int64_t>(share.size());
    const std::int64_t load = step.fixed + count * step.cost[static_cast<std::size_t>(share.front())];
    longest = std::max(longest, Time{load, speeds[rank]});
  }
  return longest;
}

std::vector<double> draw_costs(std::mt19937& engine, std::size_t samples, int kind) {
  std::lognormal_distribution<double> heavy(3.0, 1.2);
  std::uniform_int_distribution<int> few(0, 2);
  std::vector<double> costs(samples);
  std::generate(costs.begin(), costs.end(), [&] { return kind == 0 ? std::ceil(heavy(engine)) : few(engine); });
  return costs;
}

void cheapest_cut_is_exact() {
  std::mt19937 engine(1);
  for (int trial = 0; trial < 300; ++trial) {
    const std::size_t samples = 1 + engine() % 40;
    const Step step(draw_costs(engine, samples, trial % 2), 0.0, 4);
    const auto batches = static_cast<std::int64_t>(1 + engine() % 10);
    CHECK(chronica::cheapest_cut(step, batches) == cheapest_by_trying(step, batches));
  }
}

/// One sample, as many batches as samples and more, nothing to cut, and one sample that dwarfs the others.
void cheapest_cut_at_the_edges() {
  std::vector<double> giant(30, 1.0);
  giant[11] = std::ldexp(1.0, 40);
  for (const auto& costs : {std::vector<double>{5.0}, std::vector<double>(20, 0.0), std::vector<double>(20, 3.0),
                            std::vector<double>{1.0, 2.0, 3.0}, giant}) {
    const Step step(costs, 0.0, 4);
    for (const std::int64_t batches : {1, 2, 3, 20, 1000}) {
      CHECK(chronica::cheapest_cut(step, batches) == cheapest_by_trying(step, batches));
    }
    CHECK(chronica::cheapest_cut(step, 1) == step.samples() * step.cost.front());
    CHECK(chronica::cheapest_cut(step, 1000) == std::accumulate(step.cost.begin(), step.cost.end(), std::int64_t{0}));
  }
}

/// No makespan misses the best by more than two units of the integer costs (capacities of slow ranks round down).
void padded_cuts_are_optimal() {
  std::mt19937 engine(2);
  for (int trial = 0; trial < 400; ++trial) {
    const auto ranks = static_cast<std::int64_t>(1 + engine() % 4);
    const auto samples = ranks + static_cast<std::int64_t>(engine() % 7);
    std::vector<double> given(static_cast<std::size_t>(ranks), 1.0);
    if (trial % 3 != 0) {
      std::generate(given.begin(), given.end(), [&] { return 0.25 * static_cast<double>(1 + engine() % 8); });
    }
    const Speeds speeds(given);
    const Step step(draw_costs(engine, static_cast<std::size_t>(samples), trial % 2), trial % 5 == 0 ? 7.0 : 0.0,
                    ranks);
    const bool equal = trial % 4 == 0;
    const CountRange counts =
        equal ? CountRange{samples / ranks, (samples + ranks - 1) / ranks} : CountRange{1, samples - ranks + 1};
    const Time found = makespan(step, speeds, chronica::cut_padded(step, speeds, counts));
    const Time best = best_by_trying(step, speeds, counts);
    CHECK(!(found < best));
    CHECK(!(Time{best.load + 2, best.speed} < found));
    CHECK(!(best < chronica::lower_bound(step, speeds, counts, true)));
  }
}

/// Too many different speeds to try all orders: still complete, and never below the bound.
void many_speeds_fall_back() {
  std::mt19937 engine(3);
  std::vector<double> given(40);
  std::iota(given.begin(), given.end(), 20.0);
  const Speeds speeds(given);
  const Step step(draw_costs(engine, 400, 0), 0.0, 40);
  const CountRange counts{1, 361};
  const auto shares = chronica::cut_padded(step, speeds, counts);
  std::size_t taken = 0;
  for (const auto& share : shares) {
    CHECK(!share.empty());
    taken += share.size();
  }
  CHECK(taken == 400);
  CHECK(!(makespan(step, speeds, shares) < chronica::lower_bound(step, speeds, counts, true)));
}

}  // namespace

int main() {
  cheapest_cut_is_exact();
  cheapest_cut_at_the_edges();
  padded_cuts_are_optimal();
  many_speeds_fall_back();
  return failures;
}
