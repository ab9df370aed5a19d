#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <numeric>
#include <optional>
#include <random>
#include <span>
#include <vector>

#include "assign.hpp"
#include "bounds.hpp"
#include "check.hpp"
#include "draw.hpp"
#include "solve.hpp"

namespace {

using chronica::Assignment;
using chronica::Block;
using chronica::Limits;
using chronica::Solution;
using chronica::Speeds;
using chronica::Splitter;
using chronica::Step;
using chronica::Time;

constexpr double kUnlimited = std::numeric_limits<double>::infinity();

/// One step of an assignment, and where in it things are.
struct StepView {
  std::int64_t first;    // in drawn order
  std::int64_t samples;  // in the step
  std::span<const double> costs;
  std::span<const double> sizes;
  double unit;  // what costs may be rounded by, altogether
};

StepView view_of(const Block& block, std::int64_t step) {
  const std::int64_t first = step * block.global_batch;
  const std::int64_t samples = std::min(block.global_batch, std::ssize(block.costs) - first);
  const auto at = static_cast<std::size_t>(first);
  const auto count = static_cast<std::size_t>(samples);
  const auto costs = block.costs.subspan(at, count);
  return {first, samples, costs, block.sizes.subspan(at, count),
          1e-9 * (block.fixed_cost + *std::max_element(costs.begin(), costs.end()))};
}

/// The samples of one rank: positions [first, end), micro-batches [batch, batch_end).
struct RankView {
  std::int64_t rank;
  std::size_t place;  // in (steps · ranks)
  std::int64_t first;
  std::int64_t end;
  std::size_t batch;
  std::size_t batch_end;
};

bool has_too_few(const Block& block, const StepView& step) {
  const std::int64_t least = block.equal_counts || block.is_dealt ? 1 : block.least;
  return step.samples < least * std::ssize(block.speeds);
}

void check_count(const Block& block, const StepView& step, std::int64_t count, std::int64_t held) {
  const std::int64_t ranks = std::ssize(block.speeds);
  if (count == 0) {
    CHECK(has_too_few(block, step));
    CHECK(held == block.least);
    return;
  }
  CHECK(held == count);
  if (block.equal_counts || block.is_dealt) {
    CHECK(count == step.samples / ranks || count == (step.samples + ranks - 1) / ranks);
  } else {
    CHECK(count >= std::min(block.least, step.samples));
  }
}

/// Fillers are the cheapest of their step, over again if it has not enough.
void check_fillers(const StepView& step, std::span<const std::int64_t> positions) {
  std::vector<double> cheapest(step.costs.begin(), step.costs.end());
  std::sort(cheapest.begin(), cheapest.end());
  std::vector<double> expected;
  std::vector<double> found;
  for (std::size_t i = 0; i < positions.size(); ++i) {
    expected.push_back(cheapest[i % cheapest.size()]);
    found.push_back(step.costs[static_cast<std::size_t>(positions[i] - step.first)]);
  }
  std::sort(expected.begin(), expected.end());
  std::sort(found.begin(), found.end());
  CHECK(found == expected);
}

/// The micro-batches of a rank: their lengths, cost and order, and what the rank's load and tail are made of.
void check_batches(const Block& block, const Assignment& result, const StepView& step, const RankView& rank,
                   bool keeps_capacity) {
  double load = 0.0;
  double largest = 0.0;
  double last = 0.0;
  std::int64_t first = rank.first;
  for (std::size_t batch = rank.batch; batch < rank.batch_end; ++batch) {
    const std::int64_t held = result.sizes[batch];
    CHECK(held > 0);
    double sum = 0.0;
    double dearest = 0.0;
    double length = 0.0;
    for (std::int64_t i = first; i < first + held; ++i) {
      const auto position = static_cast<std::size_t>(result.positions[static_cast<std::size_t>(i)]);
      sum += block.costs[position];
      dearest = std::max(dearest, block.costs[position]);
      length = block.padded ? std::max(length, block.sizes[position]) : length + block.sizes[position];
    }
    CHECK(result.lengths[batch] == length);
    if (keeps_capacity) {
      const double size = block.padded ? length * static_cast<double>(held) : length;
      CHECK(size <= block.capacity[static_cast<std::size_t>(rank.rank)]);
    }
    last = block.fixed_cost + (block.padded ? static_cast<double>(held) * dearest : sum);
    largest = std::max(largest, last);
    load += last;
    first += held;
  }
  const double speed = block.speeds[static_cast<std::size_t>(rank.rank)];
  const double unit = step.unit + 1e-9 * (load + std::numeric_limits<double>::min());
  CHECK(first == rank.end);
  CHECK(last >= largest - unit);  // the allreduce overlaps with the costliest
  CHECK(std::abs(result.loads[rank.place] - load / speed) <= unit / speed);
  CHECK(std::abs(result.tails[rank.place] - chronica::kBackwardShare * last / speed) <= unit / speed);
  CHECK(result.tails[rank.place] <= result.loads[rank.place]);
}

/// Of an order that is dealt already every rank keeps what is its own.
void check_dealt(const Block& block, const Assignment& result, const StepView& step, const RankView& rank) {
  const std::int64_t ranks = std::ssize(block.speeds);
  const std::int64_t begin =
      step.first + rank.rank * (step.samples / ranks) + std::min(rank.rank, step.samples % ranks);
  for (std::int64_t i = rank.first; i < rank.end; ++i) {
    const std::int64_t position = result.positions[static_cast<std::size_t>(i)];
    CHECK(position >= begin && position < begin + result.counts[rank.place]);
  }
}

bool is_same(const Assignment& a, const Assignment& b) {
  return a.positions == b.positions && a.sizes == b.sizes && a.lengths == b.lengths && a.parts == b.parts &&
         a.counts == b.counts && a.loads == b.loads && a.tails == b.tails && a.lower_bounds == b.lower_bounds &&
         a.infeasible_step == b.infeasible_step;
}

/// Whether every sample fits every rank, alone, and there may be as many micro-batches as samples.
bool is_certainly_feasible(const Block& block) {
  return block.micro_batches >= std::max(block.global_batch, block.least) &&
         *std::max_element(block.sizes.begin(), block.sizes.end()) <=
             *std::min_element(block.capacity.begin(), block.capacity.end());
}

void check_result(const Block& block, const Assignment& result, bool keeps_capacity) {
  const std::int64_t ranks = std::ssize(block.speeds);
  const std::int64_t steps = (std::ssize(block.costs) + block.global_batch - 1) / block.global_batch;
  CHECK(std::ssize(result.parts) == steps * ranks);
  CHECK(std::ssize(result.counts) == steps * ranks);
  CHECK(std::ssize(result.loads) == steps * ranks);
  CHECK(std::ssize(result.tails) == steps * ranks);
  CHECK(std::ssize(result.lower_bounds) == steps);
  CHECK(result.sizes.size() == result.lengths.size());
  CHECK(std::accumulate(result.sizes.begin(), result.sizes.end(), std::int64_t{0}) == std::ssize(result.positions));

  std::vector<int> seen(block.costs.size(), 0);
  RankView rank{0, 0, 0, 0, 0, 0};
  for (std::int64_t number = 0; number < steps; ++number) {
    const StepView step = view_of(block, number);
    double makespan = 0.0;
    for (rank.rank = 0; rank.rank < ranks; ++rank.rank) {
      rank.place = static_cast<std::size_t>(number * ranks + rank.rank);
      CHECK(result.parts[rank.place] >= 1 && result.parts[rank.place] <= block.micro_batches);
      rank.batch_end = rank.batch + static_cast<std::size_t>(result.parts[rank.place]);
      rank.end = std::accumulate(result.sizes.begin() + static_cast<std::ptrdiff_t>(rank.batch),
                                 result.sizes.begin() + static_cast<std::ptrdiff_t>(rank.batch_end), rank.first);
      const auto positions =
          std::span(result.positions)
              .subspan(static_cast<std::size_t>(rank.first), static_cast<std::size_t>(rank.end - rank.first));
      for (const std::int64_t position : positions) {
        CHECK(position >= step.first && position < step.first + step.samples);
        seen[static_cast<std::size_t>(position)] += result.counts[rank.place] > 0 ? 1 : 0;
      }
      check_count(block, step, result.counts[rank.place], rank.end - rank.first);
      check_batches(block, result, step, rank, keeps_capacity);
      if (result.counts[rank.place] == 0) {
        check_fillers(step, positions);
      } else if (block.is_dealt) {
        check_dealt(block, result, step, rank);
      }
      makespan = std::max(makespan, result.loads[rank.place]);
      rank.first = rank.end;
      rank.batch = rank.batch_end;
    }
    CHECK(makespan >= result.lower_bounds[static_cast<std::size_t>(number)]);
  }
  CHECK(std::all_of(seen.begin(), seen.end(), [](int times) { return times == 1; }));
}

/// Everything that holds for every assignment, whatever the block.
void check_assignment(const Block& block) {
  const Assignment result = chronica::assign(block);
  for (const std::int64_t threads : {2, 3}) {
    CHECK(block.is_hard && result.infeasible_step >= 0
              ? chronica::assign(block, threads).infeasible_step == result.infeasible_step
              : is_same(result, chronica::assign(block, threads)));
  }
  if (result.infeasible_step >= 0) {
    CHECK(block.is_hard && !is_certainly_feasible(block));
    return;
  }
  if (block.is_hard) {
    check_result(block, result, true);
    return;
  }
  // Where the capacity can be kept everywhere it is kept, error or not.
  Block hard = block;
  hard.is_hard = true;
  check_result(block, result, chronica::assign(hard).infeasible_step < 0);
}

/// What a block owns.
struct Given {
  std::vector<double> sizes;
  std::vector<double> costs;
  std::vector<double> speeds;
  std::vector<double> capacity;

  [[nodiscard]] Block block(std::int64_t global_batch) const {
    return {.costs = costs, .sizes = sizes, .speeds = speeds, .capacity = capacity, .global_batch = global_batch};
  }
};

Given draw_given(draw::Engine& engine, std::int64_t samples, std::int64_t ranks, std::int64_t kinds_of_speed,
                 int kind) {
  Given given{draw::sizes(engine, samples, kind),
              {},
              draw::speeds(ranks, kinds_of_speed),
              std::vector<double>(static_cast<std::size_t>(ranks), kUnlimited)};
  given.costs = given.sizes;
  if (engine() % 2 == 0) {
    std::transform(given.sizes.begin(), given.sizes.end(), given.costs.begin(),
                   [](double size) { return 0.3 * size + size * size / 64.0; });
  }
  return given;
}

/// Every option with every other, in turn and at random.
void every_option_with_every_other() {
  draw::Engine engine(1);
  const std::array comms{0.0, 0.0, 5.0, 1000.0};
  const std::array fixed{0.0, 3.0, 200.0, 1e18};
  int infeasible = 0;
  for (int round = 0; round < 1400; ++round) {
    const std::int64_t ranks = draw::between(engine, 1, 9);
    const std::int64_t global_batch = ranks * draw::between(engine, 1, 6);
    const std::int64_t samples = draw::between(engine, 1, 3 * global_batch);
    Given given = draw_given(engine, samples, ranks, draw::between(engine, 1, 3), round % draw::kKinds);
    if (engine() % 2 == 0) {
      const double largest = *std::max_element(given.sizes.begin(), given.sizes.end());
      for (std::size_t rank = 0; rank < given.capacity.size(); ++rank) {
        given.capacity[rank] = largest * static_cast<double>(draw::between(engine, 2, 8)) / 2.0;
        if (engine() % 2 == 0) {
          given.capacity[rank] = given.capacity.front();
        }
      }
    }
    Block block = given.block(global_batch);
    block.fixed_cost = fixed[engine() % fixed.size()];
    block.is_hard = engine() % 2 == 0;
    block.least = std::array{std::int64_t{1}, std::int64_t{1}, std::int64_t{2}, global_batch / ranks,
                             2 * samples + 1}[engine() % 5];
    block.micro_batches = std::array{std::int64_t{1}, std::int64_t{2}, std::int64_t{3}, std::int64_t{5},
                                     std::int64_t{1} << 40}[engine() % 5];
    block.comm = comms[engine() % comms.size()];
    block.padded = engine() % 3 != 0;
    block.equal_counts = engine() % 3 == 0;
    block.is_dealt = engine() % 5 == 0;
    check_assignment(block);
    infeasible += block.is_hard && chronica::assign(block).infeasible_step >= 0 ? 1 : 0;
  }
  CHECK(infeasible > 40 && infeasible < 500);
}

void sizes_and_ranks() {
  draw::Engine engine(2);
  for (const std::int64_t ranks : {1, 2, 5, 33}) {
    for (const std::int64_t samples : {1, 2, 7, 65, 257}) {
      for (const std::int64_t per_rank : {1, 4}) {
        const Given given = draw_given(engine, samples, ranks, 1 + engine() % 2 * 2, 0);
        for (const bool padded : {false, true}) {
          for (const std::int64_t micro_batches : {std::int64_t{1}, std::int64_t{2}, std::int64_t{1} << 40}) {
            Block block = given.block(ranks * per_rank);
            block.padded = padded;
            block.micro_batches = micro_batches;
            block.fixed_cost = 10.0;
            for (const bool equal : {false, true}) {
              block.equal_counts = equal;
              check_assignment(block);
            }
          }
        }
      }
    }
  }
}

void more_ranks_than_samples_by_far() {
  draw::Engine engine(3);
  for (const std::int64_t kinds_of_speed : {1, 2, 50}) {
    for (const std::int64_t samples : {1, 3, 40}) {
      const Given given = draw_given(engine, samples, 500, kinds_of_speed, 0);
      for (const bool padded : {false, true}) {
        for (const std::int64_t least : {1, 3, 100}) {
          Block block = given.block(500);
          block.padded = padded;
          block.least = least;
          block.micro_batches = 2;
          check_assignment(block);
        }
      }
    }
  }
}

void strange_costs() {
  const double huge = static_cast<double>(std::numeric_limits<std::int64_t>::max());
  std::vector<double> one_giant(36, 1.0);
  one_giant[23] = std::ldexp(1.0, 40);
  std::vector<double> whole_range(36);
  for (std::size_t i = 0; i < whole_range.size(); ++i) {
    whole_range[i] = std::pow(huge, static_cast<double>(i) / 35.0);
  }
  std::vector<double> tiny_and_huge(36, 1e-300);
  tiny_and_huge[7] = 1e280;
  std::vector<double> sorted(36);
  std::iota(sorted.begin(), sorted.end(), 0.0);
  const std::vector<std::vector<double>> all = {
      std::vector<double>(36, 0.0),
      std::vector<double>(36, 1.0),
      std::vector<double>(36, huge),
      std::vector<double>(36, 1e-300),
      std::vector<double>(36, 1e280),
      one_giant,
      std::vector<double>(36, std::numeric_limits<double>::denorm_min()),
      whole_range,
      tiny_and_huge,
      sorted,
      // A step's summed load stays just below the largest double.
      std::vector<double>(36, std::numeric_limits<double>::max() / 512.0),
  };
  const std::vector<std::vector<double>> all_speeds = {
      {1.0}, {1.0, 1.0, 1.0, 1.0}, draw::speeds(7, 3), {1.0, std::ldexp(1.0, -20)}, {1e-15, 3e-15, 2e-15}};
  for (const auto& costs : all) {
    const double largest = *std::max_element(costs.begin(), costs.end());
    for (const auto& speeds : all_speeds) {
      if (largest > 1e300 && *std::min_element(speeds.begin(), speeds.end()) < 0.1) {
        continue;
      }
      const std::int64_t ranks = std::ssize(speeds);
      for (const double room : {kUnlimited, 2.0}) {
        const Given given{costs, costs, speeds,
                          std::vector<double>(speeds.size(), room < kUnlimited ? largest * room : room)};
        for (const std::int64_t micro_batches : {std::int64_t{1}, std::int64_t{3}, std::int64_t{1} << 40}) {
          for (const double fixed : {0.0, 1e18}) {
            Block block = given.block(6 * ranks);
            block.fixed_cost = fixed;
            block.micro_batches = micro_batches;
            for (const bool padded : {false, true}) {
              for (const double comm : {0.0, largest / speeds.front()}) {
                block.padded = padded;
                block.comm = comm;
                check_assignment(block);
              }
            }
          }
        }
      }
    }
  }
}

void steps_do_not_depend_on_each_other() {
  draw::Engine engine(4);
  for (int round = 0; round < 60; ++round) {
    const Given given = draw_given(engine, 100, 4, 1 + round % 2 * 2, round % draw::kKinds);
    Block block = given.block(24);
    block.fixed_cost = 2.0;
    block.padded = round % 3 != 0;
    block.micro_batches = 1 + round % 4;
    block.comm = round % 2 == 0 ? 0.0 : 30.0;
    const Assignment whole = chronica::assign(block);
    Assignment together;
    for (std::size_t first = 0; first < given.costs.size(); first += 24) {
      Block own = block;
      own.costs = block.costs.subspan(first, std::min<std::size_t>(24, block.costs.size() - first));
      own.sizes = block.sizes.subspan(first, own.costs.size());
      const Assignment alone = chronica::assign(own);
      for (const std::int64_t position : alone.positions) {
        together.positions.push_back(position + static_cast<std::int64_t>(first));
      }
      const auto append = [](auto& all, const auto& more) { all.insert(all.end(), more.begin(), more.end()); };
      append(together.sizes, alone.sizes);
      append(together.lengths, alone.lengths);
      append(together.parts, alone.parts);
      append(together.counts, alone.counts);
      append(together.loads, alone.loads);
      append(together.tails, alone.tails);
      append(together.lower_bounds, alone.lower_bounds);
    }
    CHECK(is_same(whole, together));
  }
}

/// The first of several steps that cannot keep a hard capacity, on any number of threads.
void the_first_infeasible_step_is_named() {
  const Given given{{1, 1, 1, 1, 9, 1, 1, 1, 9, 1, 1, 1}, {1, 1, 1, 1, 9, 1, 1, 1, 9, 1, 1, 1}, {1, 1}, {4, 4}};
  Block block = given.block(4);
  block.is_hard = true;
  for (const bool padded : {false, true}) {
    block.padded = padded;
    for (const std::int64_t threads : {1, 2, 3, 8}) {
      CHECK(chronica::assign(block, threads).infeasible_step == 1);
    }
  }
  block.is_hard = false;
  check_assignment(block);
}

/// A step and what the ranks may do in it, for solve().
struct Trial {
  Given given;
  Step step;
  Speeds speeds;
  Limits limits;
  double comm;

  Trial(draw::Engine& engine, int kind, bool is_padded, bool is_equal)
      : Trial(engine, kind, is_padded, is_equal, draw::between(engine, 1, 8)) {}

  [[nodiscard]] std::optional<Solution> solve() const {
    const double capacity = *std::max_element(given.capacity.begin(), given.capacity.end());
    const Time bound = chronica::lower_bound(step, speeds, limits.counts, limits.micro_batches, capacity);
    return chronica::solve(step, speeds, limits, comm, bound);
  }

  [[nodiscard]] double finish(const Solution& solution) const {
    const Splitter splitter(step, speeds, limits, comm);
    double latest = 0.0;
    for (std::int64_t rank = 0; rank < speeds.ranks(); ++rank) {
      latest = std::max(latest, splitter.finish(rank, solution.splits[static_cast<std::size_t>(rank)]));
    }
    return latest;
  }

 private:
  Trial(draw::Engine& engine, int kind, bool is_padded, bool is_equal, std::int64_t ranks)
      : given(
            draw_given(engine, ranks + draw::between(engine, 0, 6 * ranks), ranks, draw::between(engine, 1, 3), kind)),
        step(given.costs, given.sizes, std::array{0.0, 5.0, 100.0, 1e5}[engine() % 4], ranks, is_padded),
        speeds(given.speeds) {
    if (engine() % 2 == 0) {
      const double largest = *std::max_element(given.sizes.begin(), given.sizes.end());
      const double unit = static_cast<double>(draw::between(engine, 2, 12)) / 2.0;
      std::fill(given.capacity.begin(), given.capacity.end(), largest * unit);
    }
    const std::int64_t samples = step.samples();
    const std::int64_t least = draw::between(engine, 1, samples / ranks);
    limits = {{least, samples - least * (ranks - 1)}, draw::between(engine, 1, 6), given.capacity};
    if (is_equal) {
      limits.counts = {samples / ranks, (samples + ranks - 1) / ranks};
    }
    const double total = std::accumulate(given.costs.begin(), given.costs.end(), 0.0);
    comm = std::array{0.0, 0.2, 1.0}[engine() % 3] * total / static_cast<double>(ranks);
  }
};

void it_is_never_slower_than_dealing_in_turn() {
  draw::Engine engine(5);
  int earlier = 0;
  int trials = 0;
  for (int round = 0; round < 1200; ++round) {
    const Trial trial(engine, round % draw::kKinds, round % 3 != 0, round % 4 == 0);
    const auto plain = chronica::keep(trial.step, trial.speeds, trial.limits, trial.comm,
                                      chronica::in_turn(trial.step, trial.speeds.ranks()));
    if (plain) {
      const auto found = trial.solve();
      CHECK(found && trial.finish(*found) <= trial.finish(*plain));
      earlier += found && trial.finish(*found) < trial.finish(*plain) ? 1 : 0;
      ++trials;
    }
  }
  CHECK(trials > 600 && earlier > trials / 2);
}

void many_micro_batches_are_never_slower_than_one() {
  draw::Engine engine(6);
  int trials = 0;
  for (int round = 0; round < 800; ++round) {
    Trial trial(engine, round % draw::kKinds, round % 3 != 0, round % 4 == 0);
    trial.limits.micro_batches = 1;
    const auto one = trial.solve();
    if (one) {
      ++trials;
      for (const std::int64_t most : {std::int64_t{2}, std::int64_t{3}, trial.step.samples()}) {
        trial.limits.micro_batches = most;
        const auto many = trial.solve();
        CHECK(many.has_value());
        CHECK(!many || trial.finish(*many) <= trial.finish(*one));
      }
    }
  }
  CHECK(trials > 400);
}

/// Of 10, 9.5 and 9 the fast rank best takes the first two; but these do not fit into one micro-batch, and two cost too
/// much, so it takes the last two.
void equal_counts_too_look_for_one_micro_batch_each() {
  const Given given{{10.0, 9.5, 9.0}, {10.0, 9.5, 9.0}, {1.0, 1.05}, {19.5, 19.5}};
  Block block = given.block(3);
  block.global_batch = 4;
  block.fixed_cost = 1000.0;
  block.equal_counts = true;
  for (const std::int64_t micro_batches : {1, 2}) {
    block.micro_batches = micro_batches;
    check_assignment(block);
    const Assignment result = chronica::assign(block);
    CHECK(std::abs(*std::max_element(result.loads.begin(), result.loads.end()) - 1010.0) < 1e-6);
  }
}

/// A capacity that makes for more micro-batches than ranks, and an allreduce to overlap with.
void more_micro_batches_than_ranks_are_needed() {
  for (const double cost : {0.0, 1.0, 1e-9}) {
    for (const double fixed : {0.0, 1.0}) {
      for (const std::int64_t samples : {20, 1000}) {
        const auto count = static_cast<std::size_t>(samples);
        const Given given{std::vector<double>(count, 1.0), std::vector<double>(count, cost), {1.0, 1.0}, {1.0, 1.0}};
        Block block = given.block(samples);
        block.fixed_cost = fixed;
        block.micro_batches = samples;
        block.comm = 1.0;
        check_assignment(block);
      }
    }
  }
}

}  // namespace

int main() {
  every_option_with_every_other();
  sizes_and_ranks();
  more_ranks_than_samples_by_far();
  strange_costs();
  steps_do_not_depend_on_each_other();
  the_first_infeasible_step_is_named();
  it_is_never_slower_than_dealing_in_turn();
  many_micro_batches_are_never_slower_than_one();
  equal_counts_too_look_for_one_micro_batch_each();
  more_micro_batches_than_ranks_are_needed();
  return failures;
}
