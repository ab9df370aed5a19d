#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "check.hpp"
#include "window.hpp"

namespace {

using chronica::Window;

struct Outcome {
  std::int64_t moved = 0;  // samples that changed their step
  double before = 0.0;     // Σ over steps of max(largest ÷ fastest rank, all ÷ all ranks)
  double after = 0.0;
  double ideal = 0.0;  // Σ over steps of all ÷ all ranks
};

double time_of_steps(const Window& window, const std::vector<std::int64_t>& order) {
  const double fastest = *std::max_element(window.speeds.begin(), window.speeds.end());
  const double all_speeds = std::accumulate(window.speeds.begin(), window.speeds.end(), 0.0);
  const double all_fixed = window.fixed_cost * static_cast<double>(window.speeds.size());
  double time = 0.0;
  for (auto first = order.begin(); first != order.end(); first += window.global_batch) {
    double largest = 0.0;
    double total = 0.0;
    std::for_each(first, first + window.global_batch, [&](std::int64_t sample) {
      largest = std::max(largest, window.costs[static_cast<std::size_t>(sample)]);
      total += window.costs[static_cast<std::size_t>(sample)];
    });
    time += std::max((largest + window.fixed_cost) / fastest, (total + all_fixed) / all_speeds);
  }
  return time;
}

/// Everything that holds for every window; `rounding` is how much costs may lose as integers, relative to the time.
Outcome check_window(const Window& window, double rounding = 1e-9) {
  const std::vector<std::int64_t> order = chronica::regroup(window);
  const std::int64_t samples = std::ssize(window.costs);
  CHECK(std::ssize(order) == samples);
  CHECK(order == chronica::regroup(window));
  std::vector<std::int64_t> identity(window.costs.size());
  std::iota(identity.begin(), identity.end(), std::int64_t{0});
  CHECK(std::is_permutation(order.begin(), order.end(), identity.begin()));

  Outcome outcome;
  for (std::int64_t place = 0; place < samples; ++place) {
    const std::int64_t sample = order[static_cast<std::size_t>(place)];
    const bool moved = sample / window.global_batch != place / window.global_batch;
    CHECK(moved || sample == place);
    outcome.moved += moved ? 1 : 0;
  }
  CHECK(outcome.moved <= window.most_moved);

  outcome.before = time_of_steps(window, identity);
  outcome.after = time_of_steps(window, order);
  const double total = std::accumulate(window.costs.begin(), window.costs.end(), 0.0);
  const auto fixed_costs = static_cast<double>(samples / window.global_batch * std::ssize(window.speeds));
  outcome.ideal =
      (total + fixed_costs * window.fixed_cost) / std::accumulate(window.speeds.begin(), window.speeds.end(), 0.0);
  CHECK(outcome.after <= outcome.before * (1.0 + rounding));
  CHECK(outcome.after < outcome.before || outcome.moved == 0);
  return outcome;
}

std::vector<double> speeds_of(std::int64_t ranks, bool uneven) {
  std::vector<double> speeds(static_cast<std::size_t>(ranks), 1.0);
  for (std::size_t rank = 0; uneven && rank < speeds.size(); ++rank) {
    speeds[rank] = 1.0 / static_cast<double>(1 + rank % 3);
  }
  return speeds;
}

/// Lognormal sizes, clipped; costs grow with the square of the size.
std::vector<double> heavy_tail(std::int64_t samples, double sigma, std::uint64_t seed) {
  std::mt19937_64 engine(seed);
  std::normal_distribution<double> normal(6.0, sigma);
  std::vector<double> costs(static_cast<std::size_t>(samples));
  std::generate(costs.begin(), costs.end(), [&] {
    const double size = std::min(std::exp(normal(engine)), 8192.0);
    return size + size * size / 2048.0;
  });
  return costs;
}

void heavy_tails_no_longer_dominate() {
  constexpr std::int64_t kGlobalBatch = 128;
  constexpr std::int64_t kSamples = 64 * kGlobalBatch;
  const auto speeds = speeds_of(32, false);
  for (std::uint64_t seed = 0; seed < 1; ++seed) {
    const auto costs = heavy_tail(kSamples, 1.0, seed);
    const Outcome quarter = check_window({costs, 0.0, speeds, kGlobalBatch, kSamples / 4});
    CHECK(quarter.before > 4.0 * quarter.ideal);
    CHECK(quarter.after < 1.002 * quarter.ideal);
    CHECK(quarter.moved < kSamples * 15 / 100);
    const Outcome tenth = check_window({costs, 0.0, speeds, kGlobalBatch, kSamples / 10});
    CHECK(tenth.after < 1.12 * tenth.ideal);
    const Outcome twentieth = check_window({costs, 0.0, speeds, kGlobalBatch, kSamples / 20});
    CHECK(twentieth.after < 1.6 * twentieth.ideal);
    const auto wider = heavy_tail(kSamples, 1.4, seed);
    const Outcome quarter_of_wider = check_window({wider, 150.0, speeds, kGlobalBatch, kSamples / 4});
    CHECK(quarter_of_wider.after < 1.002 * quarter_of_wider.ideal);
  }
}

void no_move_without_a_gain() {
  for (const std::int64_t ranks : {1, 4, 32}) {
    for (const std::int64_t per_rank : {1, 4}) {
      const std::int64_t global_batch = ranks * per_rank;
      const auto samples = static_cast<std::size_t>(16 * global_batch);
      const std::vector<std::vector<double>> all = {
          std::vector<double>(samples, 0.0),
          std::vector<double>(samples, 7.5),
          std::vector<double>(samples, std::numeric_limits<double>::max() / 1e6),
      };
      for (const auto& costs : all) {
        for (const double fixed : {0.0, 3.0}) {
          const auto speeds = speeds_of(ranks, false);
          CHECK(check_window({costs, fixed, speeds, global_batch, std::ssize(costs)}).moved == 0);
        }
      }
    }
  }
  const auto even = heavy_tail(64 * 128, 0.2, 3);
  CHECK(check_window({even, 0.0, speeds_of(32, false), 128, std::ssize(even)}).moved == 0);
}

void nowhere_to_move() {
  const auto costs = heavy_tail(16 * 24, 1.0, 5);
  const auto samples = std::ssize(costs);
  const auto speeds = speeds_of(8, false);
  CHECK(check_window({costs, 0.0, speeds, 24, 0}).moved == 0);
  CHECK(check_window({costs, 0.0, speeds, 24, 1}).moved == 0);
  CHECK(check_window({costs, 0.0, speeds, 24, 2}).moved == 2);
  CHECK(check_window({costs, 0.0, speeds, samples, samples}).moved == 0);          // one step
  CHECK(check_window({costs, 0.0, speeds_of(1, false), 24, samples}).moved == 0);  // one rank
  CHECK(check_window({costs, 0.0, speeds_of(1, false), 1, samples}).moved == 0);
}

/// Two steps whose largest keep everybody waiting: one takes the other's, for the next in drawn order that is small.
void two_outliers_meet() {
  std::vector<double> costs(40, 1.0);
  costs[13] = 20.0;
  costs[25] = 19.0;
  const std::vector<double> speeds(2, 1.0);
  const auto order = chronica::regroup({costs, 0.0, speeds, 10, 40});
  std::vector<std::int64_t> expected(40);
  std::iota(expected.begin(), expected.end(), std::int64_t{0});
  std::swap(expected[10], expected[25]);
  CHECK(order == expected);
}

void strange_costs() {
  std::vector<double> one_giant(320, 1.0);
  one_giant[137] = std::ldexp(1.0, 40);
  std::vector<double> giant_in_a_tail = heavy_tail(320, 1.0, 9);
  giant_in_a_tail[137] = std::ldexp(1.0, 40);
  std::vector<double> tiny_and_huge(320, 1e-300);
  tiny_and_huge[7] = 1e280;
  std::vector<double> powers(320);
  for (std::size_t i = 0; i < powers.size(); ++i) {
    powers[i] = std::ldexp(1.0, static_cast<int>(i * 7 % 64));
  }
  std::vector<double> sorted(320);
  std::iota(sorted.begin(), sorted.end(), 0.0);
  std::vector<double> two_kinds(320, 1.0);
  std::fill(two_kinds.begin() + 200, two_kinds.end(), 1000.0);
  const std::vector<std::vector<double>> all = {one_giant, giant_in_a_tail, tiny_and_huge, powers, sorted, two_kinds};
  for (const auto& costs : all) {
    for (const std::int64_t ranks : {1, 4, 8}) {
      for (const double fixed : {0.0, 3.0, 1e18}) {
        for (const std::int64_t most_moved : {0, 7, 80, 320}) {
          check_window({costs, fixed, speeds_of(ranks, false), 8, most_moved});
          check_window({costs, fixed, speeds_of(ranks, true), 32, most_moved});
        }
      }
    }
    check_window({costs, 1.0, std::vector<double>{1.0, std::ldexp(1.0, -20)}, 16, 320});
    check_window({costs, 1.0, std::vector<double>{1e-15, 3e-15, 2e-15}, 20, 320});
  }
  CHECK(check_window({one_giant, 0.0, speeds_of(4, false), 16, 320}).moved == 0);
}

void random_windows() {
  std::mt19937_64 engine(11);
  const auto up_to = [&engine](std::int64_t most) {
    return static_cast<std::int64_t>(engine() % static_cast<std::uint64_t>(most + 1));
  };
  for (int round = 0; round < 600; ++round) {
    const std::int64_t ranks = 1 + up_to(8);
    const std::int64_t global_batch = ranks + up_to(3 * ranks);
    const std::int64_t samples = global_batch * (1 + up_to(12));
    std::vector<double> costs = heavy_tail(samples, 0.5 * static_cast<double>(up_to(6)), engine());
    if (round % 3 == 0) {
      std::generate(costs.begin(), costs.end(), [&] { return static_cast<double>(up_to(5)); });  // many ties and zeros
    }
    const double fixed = 100.0 * static_cast<double>(up_to(2));
    const std::int64_t most_moved = up_to(samples);
    check_window({costs, fixed, speeds_of(ranks, round % 2 == 0), global_batch, most_moved});
  }
}

}  // namespace

int main() {
  heavy_tails_no_longer_dominate();
  no_move_without_a_gain();
  nowhere_to_move();
  two_outliers_meet();
  strange_costs();
  random_windows();
  return failures;
}
