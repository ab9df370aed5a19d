#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <random>
#include <span>
#include <vector>

#include "assign.hpp"
#include "check.hpp"

namespace {

using chronica::Assignment;
using chronica::Block;

/// Everything that holds for every assignment, whatever the costs.
void check_assignment(const Block& block) {
  const Assignment result = chronica::assign(block);
  const auto samples = static_cast<std::int64_t>(block.costs.size());
  const auto ranks = static_cast<std::int64_t>(block.speeds.size());
  const std::int64_t steps = (samples + block.global_batch - 1) / block.global_batch;
  CHECK(std::ssize(result.counts) == steps * ranks);
  CHECK(std::ssize(result.loads) == steps * ranks);
  CHECK(std::ssize(result.lower_bounds) == steps);
  CHECK(std::ssize(result.offsets) == steps * ranks + 1);
  CHECK(result.offsets.back() == std::ssize(result.positions));

  std::vector<int> seen(block.costs.size(), 0);
  for (std::int64_t place = 0; place < steps * ranks; ++place) {
    const auto at = static_cast<std::size_t>(place);
    const std::int64_t step = place / ranks;
    const std::int64_t first = step * block.global_batch;
    const std::int64_t in_step = std::min(block.global_batch, samples - first);
    const std::int64_t held = result.offsets[at + 1] - result.offsets[at];
    CHECK(held == std::max<std::int64_t>(result.counts[at], 1));
    if (block.equal_counts || in_step < ranks) {
      CHECK(result.counts[at] == in_step / ranks || result.counts[at] == (in_step + ranks - 1) / ranks);
    } else {
      CHECK(result.counts[at] >= 1);
    }

    const auto in_drawn_order = block.costs.subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(in_step));
    double sum = 0.0;
    double largest = 0.0;
    for (std::int64_t i = result.offsets[at]; i < result.offsets[at + 1]; ++i) {
      const std::int64_t position = result.positions[static_cast<std::size_t>(i)];
      CHECK(position >= first && position < first + in_step);
      seen[static_cast<std::size_t>(position)] += result.counts[at] > 0 ? 1 : 0;
      sum += block.costs[static_cast<std::size_t>(position)];
      largest = std::max(largest, block.costs[static_cast<std::size_t>(position)]);
    }
    if (result.counts[at] == 0) {
      CHECK(in_step < ranks);
      CHECK(largest == *std::min_element(in_drawn_order.begin(), in_drawn_order.end()));
    }
    const double cost = block.fixed_cost + (block.padded ? static_cast<double>(held) * largest : sum);
    const double load = cost / block.speeds[static_cast<std::size_t>(place % ranks)];
    // Costs are rounded relative to the largest of their step.
    const double scale = load + *std::max_element(block.costs.begin(), block.costs.end()) /
                                    block.speeds[static_cast<std::size_t>(place % ranks)];
    CHECK(std::abs(result.loads[at] - load) <= 1e-9 * scale);
    if (place % ranks == ranks - 1) {
      const auto begin = result.loads.begin() + step * ranks;
      CHECK(*std::max_element(begin, begin + ranks) >= result.lower_bounds[static_cast<std::size_t>(step)]);
    }
  }
  CHECK(std::all_of(seen.begin(), seen.end(), [](int times) { return times == 1; }));
}

void check_all_modes(const std::vector<double>& costs, const std::vector<double>& speeds, std::int64_t global_batch) {
  for (const bool padded : {false, true}) {
    for (const bool equal : {false, true}) {
      for (const double fixed : {0.0, 3.0, 1e18}) {
        check_assignment({costs, fixed, speeds, global_batch, padded, equal});
      }
    }
  }
}

std::vector<double> speeds_of(std::int64_t ranks, bool uneven) {
  std::vector<double> speeds(static_cast<std::size_t>(ranks), 1.0);
  for (std::size_t rank = 0; uneven && rank < speeds.size(); ++rank) {
    speeds[rank] = 1.0 / static_cast<double>(1 + rank % 3);
  }
  return speeds;
}

void sizes_and_ranks() {
  std::mt19937_64 engine(4);
  std::lognormal_distribution<double> heavy(5.0, 1.0);
  for (const std::int64_t ranks : {1, 2, 3, 5, 8, 33}) {
    for (const std::int64_t samples : {1, 2, 7, 64, 65, 257}) {
      std::vector<double> costs(static_cast<std::size_t>(samples));
      std::generate(costs.begin(), costs.end(), [&] { return std::ceil(heavy(engine)); });
      for (const std::int64_t per_rank : {1, 4}) {
        check_all_modes(costs, speeds_of(ranks, false), ranks * per_rank);
        check_all_modes(costs, speeds_of(ranks, true), ranks * per_rank);
      }
    }
  }
}

void strange_costs() {
  const double huge = static_cast<double>(std::numeric_limits<std::int64_t>::max());
  std::vector<double> one_giant(300, 1.0);
  one_giant[137] = std::ldexp(1.0, 40);
  std::vector<double> whole_range(300);
  for (std::size_t i = 0; i < whole_range.size(); ++i) {
    whole_range[i] = std::pow(huge, static_cast<double>(i) / 299.0);
  }
  std::vector<double> tiny_and_huge(300, 1e-300);
  tiny_and_huge[7] = 1e280;
  std::vector<double> sorted(300);
  std::iota(sorted.begin(), sorted.end(), 0.0);
  const std::vector<std::vector<double>> all = {
      std::vector<double>(300, 0.0),
      std::vector<double>(300, 1.0),
      std::vector<double>(300, huge),
      std::vector<double>(300, 1e-300),
      std::vector<double>(300, 1e280),
      one_giant,
      std::vector<double>(300, std::numeric_limits<double>::denorm_min()),
      whole_range,
      tiny_and_huge,
      sorted,
  };
  for (const auto& costs : all) {
    for (const std::int64_t ranks : {1, 4, 7}) {
      check_all_modes(costs, speeds_of(ranks, false), 8 * ranks);
      check_all_modes(costs, speeds_of(ranks, true), 8 * ranks);
    }
    check_all_modes(costs, {1.0, std::ldexp(1.0, -20)}, 16);
    check_all_modes(costs, {1e-15, 3e-15, 2e-15}, 24);
  }
  // A step's summed load stays just below the largest double.
  check_all_modes(std::vector<double>(100, std::numeric_limits<double>::max() / 512.0), speeds_of(3, true), 24);
}

void steps_do_not_depend_on_each_other() {
  std::mt19937_64 engine(6);
  std::vector<double> costs(100);
  std::generate(costs.begin(), costs.end(), [&] { return std::ldexp(1.0, static_cast<int>(engine() % 50)); });
  const auto speeds = speeds_of(4, true);
  constexpr std::size_t kGlobalBatch = 24;
  for (const bool padded : {false, true}) {
    const Assignment whole = chronica::assign({costs, 2.0, speeds, kGlobalBatch, padded, false});
    for (std::size_t first = 0; first < costs.size(); first += kGlobalBatch) {
      const std::size_t count = std::min(kGlobalBatch, costs.size() - first);
      const auto own = std::span<const double>(costs).subspan(first, count);
      const Assignment alone = chronica::assign({own, 2.0, speeds, kGlobalBatch, padded, false});
      for (std::size_t i = 0; i < count; ++i) {
        CHECK(whole.positions[first + i] == static_cast<std::int64_t>(first) + alone.positions[i]);
      }
      const std::size_t step = first / kGlobalBatch;
      CHECK(std::equal(alone.loads.begin(), alone.loads.end(),
                       whole.loads.begin() + static_cast<std::ptrdiff_t>(step * speeds.size())));
      CHECK(alone.lower_bounds.front() == whole.lower_bounds[step]);
    }
  }
}

void it_is_deterministic() {
  std::mt19937_64 engine(5);
  std::vector<double> costs(512);
  std::generate(costs.begin(), costs.end(), [&] { return static_cast<double>(engine() % 1000); });
  const auto speeds = speeds_of(8, true);
  for (const bool padded : {false, true}) {
    const Block block{costs, 1.0, speeds, 64, padded, false};
    CHECK(chronica::assign(block).positions == chronica::assign(block).positions);
  }
}

}  // namespace

int main() {
  sizes_and_ranks();
  strange_costs();
  steps_do_not_depend_on_each_other();
  it_is_deterministic();
  return failures;
}
