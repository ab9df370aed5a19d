#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <optional>
#include <vector>

#include "check.hpp"
#include "draw.hpp"
#include "split.hpp"

namespace {

using chronica::Limits;
using chronica::Share;
using chronica::Speeds;
using chronica::Split;
using chronica::Splitter;
using chronica::Step;

constexpr double kUnlimited = std::numeric_limits<double>::infinity();

/// A rank's share of a step, one of two ranks; what it may do with it, and how the best way is found by trying.
struct Trial {
  Step step;
  Share share;
  double speed = 1.0;
  double capacity = kUnlimited;
  std::int64_t micro_batches = 1;
  double comm = 0.0;
};

Share all_of(const Step& step) {
  Share share(static_cast<std::size_t>(step.samples()));
  std::iota(share.begin(), share.end(), std::int64_t{0});
  return share;
}

/// The split that ends a step earliest, or of the least load where that makes no difference, of every contiguous cut.
std::optional<Split> best_by_trying(const Trial& trial, const Splitter& splitter) {
  const auto count = static_cast<unsigned>(trial.share.size());
  std::optional<Split> best;
  for (unsigned borders = 0; borders < 1U << (count - 1U); ++borders) {
    Split split;
    std::int64_t first = 0;
    bool fits = true;
    for (unsigned end = 1; end <= count; ++end) {
      if (end == count || (borders >> (end - 1U) & 1U) != 0) {
        const double largest = trial.step.size[static_cast<std::size_t>(trial.share[static_cast<std::size_t>(first)])];
        const std::int64_t cost = chronica::batch_cost(trial.step, trial.share, first, end);
        fits = fits && largest * static_cast<double>(end - first) <= trial.capacity;
        split.ends.push_back(end);
        split.load += cost;
        split.largest = std::max(split.largest, cost);
        first = end;
      }
    }
    if (fits && std::ssize(split.ends) <= trial.micro_batches) {
      const double finish = splitter.finish(0, split);
      const double earliest = best ? splitter.finish(0, *best) : kUnlimited;
      if (finish < earliest || (finish == earliest && split.load < best->load)) {
        best = split;
      }
    }
  }
  return best;
}

/// What holds for every split: nothing is lost, the limits are kept, and load and largest are what they are called.
void check_split(const Trial& trial, const Share& share, const Split& split) {
  CHECK(std::is_permutation(share.begin(), share.end(), trial.share.begin(), trial.share.end()));
  CHECK(std::ssize(split.ends) <= trial.micro_batches);
  CHECK(split.ends.back() == std::ssize(share));
  std::int64_t first = 0;
  std::int64_t load = 0;
  std::int64_t largest = 0;
  for (const std::int64_t end : split.ends) {
    CHECK(end > first);
    double size = 0.0;
    std::int64_t cost = 0;
    for (std::int64_t i = first; i < end; ++i) {
      const auto sample = static_cast<std::size_t>(share[static_cast<std::size_t>(i)]);
      const auto held = end - first;
      size = trial.step.padded ? std::max(size, trial.step.size[sample] * static_cast<double>(held))
                               : size + trial.step.size[sample];
      cost = trial.step.padded ? std::max(cost, held * trial.step.cost[sample]) : cost + trial.step.cost[sample];
      CHECK(i == first || share[static_cast<std::size_t>(i - 1)] < share[static_cast<std::size_t>(i)]);
    }
    CHECK(size <= trial.capacity);
    load += trial.step.fixed + cost;
    largest = std::max(largest, trial.step.fixed + cost);
    first = end;
  }
  CHECK(load == split.load);
  CHECK(largest == split.largest);
}

/// Split the share, and compare it with the best: the quotient of the two ends of the step, 1 if there is none.
double check_trial(const Trial& trial, bool is_exact) {
  const Speeds speeds(std::array{trial.speed, 1.0});
  const std::array capacity{trial.capacity, kUnlimited};
  const Limits limits{{1, trial.step.samples()}, trial.micro_batches, capacity};
  Splitter splitter(trial.step, speeds, limits, trial.comm);
  Share share = trial.share;
  const auto split = splitter.split(0, share);
  const auto best = best_by_trying(trial, splitter);
  CHECK(split.has_value() == best.has_value());
  if (!split || !best) {
    return 1.0;
  }
  check_split(trial, share, *split);
  const double finish = splitter.finish(0, *split);
  const double earliest = splitter.finish(0, *best);
  CHECK(finish >= earliest);
  CHECK(!is_exact || finish <= earliest);
  CHECK(!is_exact || trial.comm > 0.0 || split->load == best->load);
  return earliest > 0.0 ? finish / earliest : 1.0;
}

Trial draw_trial(draw::Engine& engine, int kind) {
  const auto sizes = draw::sizes(engine, draw::between(engine, 1, 10), kind);
  const double largest = *std::max_element(sizes.begin(), sizes.end());
  const std::array fixed{0.0, 1.0, 40.0, 1e6};
  Trial trial{draw::padded(sizes, fixed[engine() % 4], 2), {}, engine() % 2 == 0 ? 1.0 : 0.3, kUnlimited, 1, 0.0};
  trial.share = all_of(trial.step);
  if (engine() % 2 == 0) {
    trial.capacity = largest * static_cast<double>(draw::between(engine, 1, 12)) / 2.0;
  }
  return trial;
}

void padded_shares_are_cut_as_cheaply_as_can_be() {
  draw::Engine engine(1);
  for (int round = 0; round < 300; ++round) {
    Trial trial = draw_trial(engine, round % draw::kKinds);
    for (const std::int64_t most : {1, 2, 3, 5, 10, 1000}) {
      trial.micro_batches = most;
      check_trial(trial, true);
    }
  }
}

/// With as many micro-batches as one likes the step ends as early as it can; with fewer, rarely later than that.
void padded_shares_make_the_allreduce_overlap() {
  draw::Engine engine(2);
  double late = 0.0;
  int limited = 0;
  for (int round = 0; round < 300; ++round) {
    Trial trial = draw_trial(engine, round % draw::kKinds);
    const double total = std::accumulate(trial.step.size.begin(), trial.step.size.end(), 0.0) / trial.speed;
    for (const double part : {1e-6, 0.3, 1.0, 100.0}) {
      trial.comm = part * (total + 1.0);
      for (const std::int64_t most : {1, 2, 3, 10, 1000}) {
        trial.micro_batches = most;
        const double quotient = check_trial(trial, most == 1 || most >= std::ssize(trial.share));
        late += quotient - 1.0;
        limited += most == 2 || most == 3 ? 1 : 0;
      }
    }
  }
  CHECK(late / limited < 0.01);
}

void a_share_of_some_samples_is_cut_like_a_step_of_them() {
  draw::Engine engine(3);
  for (int round = 0; round < 300; ++round) {
    Trial trial = draw_trial(engine, round % draw::kKinds);
    Share some;
    for (const std::int64_t sample : trial.share) {
      if (engine() % 2 == 0) {
        some.push_back(sample);
      }
    }
    if (!some.empty()) {
      trial.share = some;
      trial.micro_batches = draw::between(engine, 1, 4);
      check_trial(trial, true);
    }
  }
}

/// Without padding: all in one if that fits; else within twice the least number, for no two could be one.
void packed_shares_keep_the_capacity() {
  draw::Engine engine(4);
  for (int round = 0; round < 1500; ++round) {
    const auto sizes = draw::sizes(engine, draw::between(engine, 1, 40), round % 4);
    auto costs = sizes;
    std::transform(costs.begin(), costs.end(), costs.begin(), [&](double size) {
      return round % 2 == 0 ? size * size : static_cast<double>(draw::between(engine, 0, 9));
    });
    const double largest = *std::max_element(sizes.begin(), sizes.end());
    const double total = std::accumulate(sizes.begin(), sizes.end(), 0.0);
    Trial trial{Step(costs, sizes, 2.0, 2, false), {}, 1.0, kUnlimited, 1, 0.0};
    trial.share = all_of(trial.step);
    for (const double capacity : {kUnlimited, total, largest * 2.5, largest, largest / 2.0}) {
      for (const std::int64_t most : {1, 2, 5, 40, 1000}) {
        trial.capacity = capacity;
        trial.micro_batches = most;
        const Speeds speeds(std::array{1.0, 1.0});
        const std::array both{capacity, capacity};
        const Limits limits{{1, trial.step.samples()}, most, both};
        Share share = trial.share;
        const auto split = Splitter(trial.step, speeds, limits, 0.0).split(0, share);
        if (split) {
          check_split(trial, share, *split);
          CHECK(total > capacity || split->ends.size() == 1);
        } else {
          CHECK(largest > capacity || (total > capacity && static_cast<double>(most) < 2.0 * total / capacity + 1.0));
        }
      }
    }
  }
}

void the_end_of_a_step() {
  const std::array sizes{4.0, 4.0, 1.0, 1.0};
  const Step step = draw::padded(sizes, 0.0, 2);
  const Speeds speeds(std::array{2.0, 1.0});
  const std::array capacity{kUnlimited, kUnlimited};
  const Limits limits{{1, 4}, 4, capacity};
  const auto finish = [&](double comm) {
    Share share{0, 1, 2, 3};
    Splitter splitter(step, speeds, limits, comm);
    return splitter.finish(0, *splitter.split(0, share));
  };
  // 8 and 2 at speed 2: a load of 5, of which the last backward pass is 8 · ⅔ ÷ 2.
  CHECK(std::abs(finish(0.0) - 5.0) < 1e-12);
  CHECK(std::abs(finish(2.0) - 5.0) < 1e-12);
  CHECK(std::abs(finish(4.0) - (4.0 + 5.0 - 8.0 / 3.0)) < 1e-12);
}

}  // namespace

int main() {
  padded_shares_are_cut_as_cheaply_as_can_be();
  padded_shares_make_the_allreduce_overlap();
  a_share_of_some_samples_is_cut_like_a_step_of_them();
  packed_shares_keep_the_capacity();
  the_end_of_a_step();
  return failures;
}
