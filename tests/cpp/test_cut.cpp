#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <numeric>
#include <optional>
#include <vector>

#include "bounds.hpp"
#include "check.hpp"
#include "cut.hpp"
#include "draw.hpp"

namespace {

using chronica::CheapestCut;
using chronica::Samples;
using chronica::Step;
using chronica::Wide;

constexpr double kUnlimited = std::numeric_limits<double>::infinity();
constexpr Wide kImpossible = Wide{1} << 120;

/// The least cost, prices left aside, of the first `end` samples in exactly k micro-batches: at [k][end].
std::vector<std::vector<Wide>> cheapest_by_trying(const Samples& samples) {
  const std::size_t count = samples.cost.size();
  std::vector<std::vector<Wide>> least(count + 1, std::vector<Wide>(count + 1, kImpossible));
  least[0][0] = 0;
  for (std::size_t k = 1; k <= count; ++k) {
    for (std::size_t end = k; end <= count; ++end) {
      for (std::size_t first = k - 1; first < end; ++first) {
        const auto held = static_cast<std::int64_t>(end - first);
        if (samples.size[first] * static_cast<double>(held) <= samples.capacity) {
          least[k][end] = std::min(least[k][end], least[k - 1][first] + Wide{held} * samples.cost[first]);
        }
      }
    }
  }
  return least;
}

/// That of any number of micro-batches from `least` to `most`, each at a price.
Wide cheapest_of(const std::vector<std::vector<Wide>>& by_number, std::size_t end, Wide price, std::int64_t least,
                 std::int64_t most) {
  Wide cheapest = kImpossible;
  for (std::int64_t k = least; k <= std::min(most, std::ssize(by_number) - 1); ++k) {
    const Wide cost = by_number[static_cast<std::size_t>(k)][end];
    if (cost < kImpossible) {
      cheapest = std::min(cheapest, cost + k * price);
    }
  }
  return cheapest;
}

/// The ends reported are those of a cut within the capacity that costs what is reported, in as many micro-batches.
void check_ends(const CheapestCut& cut, const Samples& samples, std::int64_t end, std::int64_t price) {
  std::vector<std::int64_t> ends = {-1};  // what is there already stays
  cut.append_ends(end, ends);
  CHECK(ends.front() == -1);
  CHECK(std::ssize(ends) - 1 == cut.batches(end));
  CHECK(end == 0 || ends.back() == end);
  Wide cost = 0;
  std::int64_t first = 0;
  for (std::size_t i = 1; i < ends.size(); ++i) {
    const std::int64_t held = ends[i] - first;
    CHECK(held > 0);
    CHECK(samples.size[static_cast<std::size_t>(first)] * static_cast<double>(held) <= samples.capacity);
    cost += price + Wide{held} * samples.cost[static_cast<std::size_t>(first)];
    first = ends[i];
  }
  CHECK(cost == cut.cost(end));
}

void check_cut(const Samples& samples, std::int64_t price) {
  const auto by_number = cheapest_by_trying(samples);
  const std::int64_t count = std::ssize(samples.cost);
  CheapestCut cut;
  const bool is_possible = cut.solve(samples, price);
  CHECK(is_possible == (samples.size.front() <= samples.capacity));
  for (std::int64_t end = 0; is_possible && end <= count; ++end) {
    CHECK(cut.cost(end) == cheapest_of(by_number, static_cast<std::size_t>(end), price, 0, count));
    check_ends(cut, samples, end, price);
  }
  for (const std::int64_t most : {std::int64_t{1}, std::int64_t{2}, std::int64_t{3}, count - 1, count, count + 5}) {
    if (most < 1) {
      continue;
    }
    const Wide expected = cheapest_of(by_number, static_cast<std::size_t>(count), price, 1, most);
    CHECK(cut.solve_within(samples, price, most) == (expected < kImpossible));
    if (expected < kImpossible) {
      CHECK(cut.cost() == expected);
      CHECK(cut.batches() <= most);
      check_ends(cut, samples, count, price);
    }
  }
}

/// No capacity, one that every sample alone keeps, one that some samples do not, and some between.
std::vector<double> capacities(draw::Engine& engine, const std::vector<double>& sizes) {
  const double largest = sizes.front();
  const auto count = std::ssize(sizes);
  return {kUnlimited, largest * static_cast<double>(count), largest * static_cast<double>(draw::between(engine, 1, 3)),
          largest, largest / 2.0};
}

std::vector<double> descending(std::vector<double> sizes) {
  std::sort(sizes.begin(), sizes.end(), std::greater<>());
  return sizes;
}

void every_cut_is_the_cheapest() {
  draw::Engine engine(1);
  for (int trial = 0; trial < 250; ++trial) {
    const std::int64_t count = draw::between(engine, 1, trial % 8 == 0 ? 30 : 12);
    const auto sizes = descending(draw::sizes(engine, count, trial % draw::kKinds));
    std::vector<std::int64_t> costs(sizes.size());
    std::transform(sizes.begin(), sizes.end(), costs.begin(),
                   [](double size) { return static_cast<std::int64_t>(size); });
    const std::int64_t dear = std::max<std::int64_t>(1, count * costs.front());
    for (const double capacity : capacities(engine, sizes)) {
      for (const std::int64_t price : {std::int64_t{0}, std::int64_t{1}, draw::between(engine, 1, dear), 2 * dear}) {
        check_cut({costs, sizes, capacity}, price);
      }
    }
  }
}

/// Costs that are no function of the sizes but in the same order, up to where all together just fit into int64.
void costs_and_prices_of_any_magnitude() {
  draw::Engine engine(2);
  for (int trial = 0; trial < 200; ++trial) {
    const std::int64_t count = draw::between(engine, 1, 16);
    const auto sizes = descending(draw::sizes(engine, count, trial % 4));
    const std::int64_t largest = (std::int64_t{1} << 61) / count;
    std::vector<std::int64_t> costs(sizes.size());
    std::generate(costs.begin(), costs.end(),
                  [&] { return largest >> draw::between(engine, 0, trial % 2 == 0 ? 62 : 3); });
    std::sort(costs.begin(), costs.end(), std::greater<>());
    for (const double capacity : capacities(engine, sizes)) {
      for (const std::int64_t price : {std::int64_t{0}, std::int64_t{1}, largest >> 20, largest}) {
        check_cut({costs, sizes, capacity}, price);
      }
    }
  }
}

/// One object serves cut after cut of any length.
void nothing_is_left_of_the_cut_before() {
  draw::Engine engine(3);
  CheapestCut used;
  for (int trial = 0; trial < 200; ++trial) {
    const auto sizes = descending(draw::sizes(engine, draw::between(engine, 1, 30), trial % 4));
    const Step step = draw::padded(sizes, 2.0, 4);
    const Samples samples{step.cost, step.size, capacities(engine, sizes)[engine() % 5]};
    const std::int64_t most = draw::between(engine, 1, 8);
    CheapestCut fresh;
    const bool is_possible = fresh.solve_within(samples, step.fixed, most);
    CHECK(used.solve_within(samples, step.fixed, most) == is_possible);
    if (is_possible) {
      std::vector<std::int64_t> ends;
      std::vector<std::int64_t> expected;
      used.append_ends(step.samples(), ends);
      fresh.append_ends(step.samples(), expected);
      CHECK(ends == expected);
    }
  }
}

void check_total(const Step& step, double capacity) {
  const auto by_number = cheapest_by_trying({step.cost, step.size, capacity});
  const std::int64_t count = step.samples();
  const auto of = [&](std::int64_t least, std::int64_t most) {
    return cheapest_of(by_number, static_cast<std::size_t>(count), step.fixed, least, most);
  };
  for (std::int64_t number = 1; number <= count; ++number) {
    const Wide at_most = of(1, number);
    if (at_most < kImpossible) {
      CHECK(chronica::cheapest_total(step, 1, number, capacity) == at_most);
      CHECK(chronica::cheapest_total(step, number, number, capacity) == of(number, number));
    }
    const Wide at_least = of(number, count);
    if (at_least < kImpossible) {
      CHECK(chronica::cheapest_total(step, number, count, capacity) == at_least);
      CHECK(chronica::cheapest_total(step, number, 1000 * count, capacity) == at_least);
    }
  }
  // More micro-batches than samples: the others are of fillers, and cost a fixed cost at least.
  const Wide alone = of(count, count);
  if (alone < kImpossible) {
    CHECK(chronica::cheapest_total(step, count + 3, 9 * count, capacity) == alone + 3 * step.fixed);
  }
}

void totals_are_exact_for_every_number() {
  draw::Engine engine(4);
  for (int trial = 0; trial < 250; ++trial) {
    const std::int64_t count = draw::between(engine, 1, 18);
    const auto sizes = descending(draw::sizes(engine, count, trial % draw::kKinds));
    for (const double fixed : {0.0, 1.0, 50.0, 1e7, 1e18}) {
      const Step step = draw::padded(sizes, fixed, draw::between(engine, 1, 20));
      for (const double capacity : capacities(engine, sizes)) {
        check_total(step, capacity);
      }
    }
  }
}

/// A step of thousands of samples, where prices cannot be as high as all of them cost: never above the least cost.
void totals_of_large_steps_are_bounds() {
  draw::Engine engine(5);
  for (int kind = 0; kind < draw::kKinds; ++kind) {
    const auto sizes = descending(draw::sizes(engine, 6000, kind));
    const Step step = draw::padded(sizes, 3.0, 64);
    CheapestCut cut;
    for (const double capacity : {kUnlimited, sizes.front() * 500.0}) {
      for (const std::int64_t most : {1, 2, 16, 64}) {
        if (cut.solve_within({step.cost, step.size, capacity}, step.fixed, most)) {
          CHECK(chronica::cheapest_total(step, 1, most, capacity) <= cut.cost());
          CHECK(chronica::cheapest_total(step, 1, most, capacity) >= cut.cost() / 2);
        }
      }
    }
  }
}

}  // namespace

int main() {
  every_cut_is_the_cheapest();
  costs_and_prices_of_any_magnitude();
  nothing_is_left_of_the_cut_before();
  totals_are_exact_for_every_number();
  totals_of_large_steps_are_bounds();
  return failures;
}
