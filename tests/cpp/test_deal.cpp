#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <optional>
#include <vector>

#include "check.hpp"
#include "cut.hpp"
#include "deal.hpp"
#include "draw.hpp"
#include "split.hpp"

namespace {

using chronica::Dealer;
using chronica::Limits;
using chronica::Run;
using chronica::Share;
using chronica::Shares;
using chronica::Speeds;
using chronica::Step;
using chronica::Time;

using Ends = std::vector<std::vector<std::int64_t>>;

constexpr double kUnlimited = std::numeric_limits<double>::infinity();

/// What holds for all shares: every sample once, at least so many for every rank.
void check_complete(const Step& step, const Limits& limits, const Shares& shares) {
  std::vector<int> seen(step.cost.size(), 0);
  for (const Share& share : shares) {
    CHECK(std::ssize(share) >= limits.counts.least);
    CHECK(std::is_sorted(share.begin(), share.end()));
    for (const std::int64_t sample : share) {
      ++seen[static_cast<std::size_t>(sample)];
    }
  }
  CHECK(std::all_of(seen.begin(), seen.end(), [](int times) { return times == 1; }));
}

/// The makespan of the shares cut as cheaply as possible; nothing if they cannot be cut within the limits.
std::optional<Time> makespan(const Step& step, const Speeds& speeds, const Limits& limits, Shares shares) {
  chronica::Splitter splitter(step, speeds, limits, 0.0);
  Time longest{0, 1};
  for (std::int64_t rank = 0; rank < speeds.ranks(); ++rank) {
    const auto split = splitter.split(rank, shares[static_cast<std::size_t>(rank)]);
    if (!split) {
      return std::nullopt;
    }
    longest = std::max(longest, Time{split->load, speeds[rank]});
  }
  return longest;
}

/// That of the micro-batches as they are.
Time makespan_as_cut(const Step& step, const Speeds& speeds, const Shares& shares, const Ends& ends) {
  Time longest{0, 1};
  for (std::int64_t rank = 0; rank < speeds.ranks(); ++rank) {
    const auto at = static_cast<std::size_t>(rank);
    std::int64_t load = 0;
    std::int64_t first = 0;
    for (const std::int64_t end : ends[at]) {
      load += chronica::batch_cost(step, shares[at], first, end);
      first = end;
    }
    longest = std::max(longest, Time{load, speeds[rank]});
  }
  return longest;
}

struct Trial {
  Step step;
  Speeds speeds;
  std::vector<double> capacity;
  Limits limits;
};

Trial draw_trial(draw::Engine& engine, int kind) {
  const std::int64_t ranks = draw::between(engine, 1, 9);
  const std::int64_t samples = ranks * draw::between(engine, 1, 6) + draw::between(engine, 0, ranks - 1);
  const std::array fixed{0.0, 5.0, 60.0, 1e7};
  const auto sizes = draw::sizes(engine, samples, kind);
  Trial trial{draw::padded(sizes, fixed[engine() % 4], ranks),
              Speeds(draw::speeds(ranks, draw::between(engine, 1, 3))),
              std::vector<double>(static_cast<std::size_t>(ranks), kUnlimited),
              {}};
  if (engine() % 3 != 0) {
    std::generate(trial.capacity.begin(), trial.capacity.end(),
                  [&] { return trial.step.size.front() * static_cast<double>(draw::between(engine, 2, 10)) / 2.0; });
  }
  const std::int64_t least = draw::between(engine, 1, samples / ranks);
  const std::array most{std::int64_t{1}, std::int64_t{2}, std::int64_t{3}, samples, std::int64_t{1} << 40};
  trial.limits = {{least, samples - least * (ranks - 1)}, most[engine() % most.size()], trial.capacity};
  return trial;
}

/// A cut into micro-batches, its price such that there are more or fewer of them.
std::optional<std::vector<Run>> cut_of(const Trial& trial, std::int64_t price) {
  chronica::CheapestCut cut;
  const double largest = *std::max_element(trial.capacity.begin(), trial.capacity.end());
  if (!cut.solve({trial.step.cost, trial.step.size, largest}, price)) {
    return std::nullopt;
  }
  return cut.runs(trial.step.samples());
}

void what_is_dealt_keeps_the_limits() {
  draw::Engine engine(1);
  int dealt = 0;
  for (int round = 0; round < 3000; ++round) {
    const Trial trial = draw_trial(engine, round % draw::kKinds);
    auto runs = cut_of(trial, trial.step.fixed + trial.step.cost.front() * draw::between(engine, 0, 2));
    if (!runs) {
      continue;
    }
    std::vector<Run> already;  // in every second round the fastest rank has the last run already, where it may
    const auto fastest = static_cast<std::size_t>(trial.speeds.fastest_first().front());
    const Run last = runs->back();
    const double size =
        trial.step.size[static_cast<std::size_t>(last.first)] * static_cast<double>(last.end - last.first);
    if (round % 2 == 0 && size <= trial.capacity[fastest]) {
      already = {last};
      runs->pop_back();
    }
    Dealer dealer(trial.step, trial.speeds, trial.limits);
    if (!dealer.deal(*runs, already)) {
      CHECK(trial.limits.micro_batches < trial.step.samples() || trial.capacity.front() < kUnlimited);
      continue;
    }
    ++dealt;
    const Shares before = dealer.shares();
    check_complete(trial.step, trial.limits, before);
    CHECK(makespan(trial.step, trial.speeds, trial.limits, before).has_value());
    dealer.improve(Time{0, 1});
    const Shares after = dealer.shares();
    check_complete(trial.step, trial.limits, after);
    CHECK(makespan(trial.step, trial.speeds, trial.limits, after).has_value());
  }
  CHECK(dealt > 1500);
}

/// If every sample fits every rank, alone, nothing stands in the way.
void samples_that_fit_everywhere_are_always_dealt() {
  draw::Engine engine(2);
  for (int round = 0; round < 1000; ++round) {
    Trial trial = draw_trial(engine, round % draw::kKinds);
    trial.limits.micro_batches = trial.step.samples();
    for (double& each : trial.capacity) {
      each = std::max(each, trial.step.size.front());
    }
    const auto runs = cut_of(trial, trial.step.fixed);
    CHECK(runs.has_value());
    Dealer dealer(trial.step, trial.speeds, trial.limits);
    CHECK(dealer.deal(*runs));
    check_complete(trial.step, trial.limits, dealer.shares());
  }
}

/// From any micro-batches within the limits, of samples that do not follow each other.
void it_is_never_worse_after_improve() {
  draw::Engine engine(3);
  int better = 0;
  int trials = 0;
  for (int round = 0; round < 3000; ++round) {
    const Trial trial = draw_trial(engine, round % draw::kKinds);
    Shares shares(trial.capacity.size());
    for (std::int64_t sample = 0; sample < trial.step.samples(); ++sample) {
      shares[static_cast<std::size_t>(sample) % shares.size()].push_back(sample);
    }
    Ends ends(shares.size());
    chronica::Splitter splitter(trial.step, trial.speeds, trial.limits, 0.0);
    bool is_possible = true;
    for (std::size_t rank = 0; rank < shares.size(); ++rank) {
      const auto split = splitter.split(static_cast<std::int64_t>(rank), shares[rank]);
      is_possible = is_possible && split;
      if (split) {
        ends[rank] = split->ends;
      }
    }
    if (!is_possible) {
      continue;
    }
    ++trials;
    Dealer dealer(trial.step, trial.speeds, trial.limits);
    dealer.begin_with(shares, ends);
    CHECK(dealer.shares() == shares);
    dealer.improve(Time{0, 1});
    check_complete(trial.step, trial.limits, dealer.shares());
    const Time before = makespan_as_cut(trial.step, trial.speeds, shares, ends);
    const auto after = makespan(trial.step, trial.speeds, trial.limits, dealer.shares());
    CHECK(after && !(before < *after));
    better += after && *after < before ? 1 : 0;
    // Near enough is left alone.
    Dealer content(trial.step, trial.speeds, trial.limits);
    content.begin_with(shares, ends);
    content.improve(before);
    CHECK(content.shares() == shares);
  }
  CHECK(trials > 1500 && better > trials / 3);
}

/// Three micro-batches of one sample each on one rank, a small one on the other: one of the three goes over, alone.
void a_whole_micro_batch_moves() {
  const std::array sizes{4.0, 4.0, 4.0, 1.0};
  const Step step = draw::padded(sizes, 1.0, 2);
  const Speeds speeds(std::array{1.0, 1.0});
  const std::array capacity{kUnlimited, kUnlimited};
  const Limits limits{{1, 3}, 3, capacity};
  Dealer dealer(step, speeds, limits);
  dealer.begin_with({{0, 1, 2}, {3}}, {{1, 2, 3}, {1}});
  dealer.improve(Time{0, 1});
  CHECK(std::ssize(dealer.shares().front()) == 2);
  CHECK(dealer.shares().back().back() == 3);
}

}  // namespace

int main() {
  what_is_dealt_keeps_the_limits();
  samples_that_fit_everywhere_are_always_dealt();
  it_is_never_worse_after_improve();
  a_whole_micro_batch_moves();
  return failures;
}
