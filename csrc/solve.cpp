#include "solve.hpp"

#include <algorithm>
#include <cstddef>
#include <limits>
#include <span>
#include <utility>

#include "cut.hpp"
#include "deal.hpp"
#include "fill.hpp"
#include "long_runs.hpp"
#include "one_batch.hpp"
#include "pack.hpp"

namespace chronica {
namespace {

/// Which rank a sample goes to when the drawn order is dealt out in turn. Most steps are small: a short division.
std::size_t rank_in_turn(const Step& step, std::int64_t sample, std::int64_t ranks) {
  const auto place = static_cast<std::uint64_t>(step.position[static_cast<std::size_t>(sample)]);
  const auto count = static_cast<std::uint64_t>(ranks);
  if (place <= std::numeric_limits<std::uint32_t>::max()) {
    return static_cast<std::uint32_t>(place) % static_cast<std::uint32_t>(count);
  }
  return place % count;
}

/// Cut every share into micro-batches; nothing if one does not fit the limits.
std::optional<Solution> split_all(Splitter& splitter, Shares shares) {
  const std::vector<char> is_filler(shares.size(), 0);
  Solution solution{std::move(shares), {}, is_filler};
  for (std::size_t rank = 0; rank < solution.shares.size(); ++rank) {
    auto split = splitter.split(static_cast<std::int64_t>(rank), solution.shares[rank]);
    if (!split) {
      return std::nullopt;
    }
    solution.splits.push_back(std::move(*split));
  }
  return solution;
}

class Solver {
 public:
  Solver(const Step& step, const Speeds& speeds, const Limits& limits, double comm, const Time& bound)
      : step_(step),
        speeds_(speeds),
        limits_(limits),
        comm_(comm),
        splitter_(step, speeds, limits, comm),
        bound_(bound) {}

  std::optional<Solution> best() && {
    if (!step_.padded) {
      pack_samples();
    } else if (limits_.micro_batches == 1) {
      consider(one_batch_each(step_, speeds_, limits_));
    } else if (limits_.counts.most - limits_.counts.least <= 1) {
      deal_equal_counts();
    } else {
      deal_micro_batches();
    }
    consider_plain();
    return std::move(best_);
  }

 private:
  /// How good a solution is, the most important first; less is better.
  struct Grade {
    double finish = std::numeric_limits<double>::infinity();  // end of the step, the allreduce included
    double makespan = 0.0;
    double total = 0.0;
    double tail = 0.0;  // less the shortest last backward pass

    auto operator<=>(const Grade&) const = default;
  };

  void consider(std::optional<Shares> shares) {
    auto solution = shares ? split_all(splitter_, std::move(*shares)) : std::nullopt;
    if (!solution) {
      return;
    }
    Grade grade{0.0, 0.0, 0.0, -std::numeric_limits<double>::infinity()};
    for (std::int64_t rank = 0; rank < speeds_.ranks(); ++rank) {
      const Split& split = solution->splits[static_cast<std::size_t>(rank)];
      const double load = speeds_.time(split.load, speeds_[rank], step_.exponent);
      grade.finish = std::max(grade.finish, splitter_.finish(rank, split));
      grade.makespan = std::max(grade.makespan, load);
      grade.total += load;
      grade.tail = std::max(grade.tail, -speeds_.time(split.largest, speeds_[rank], step_.exponent));
    }
    if (!best_ || grade < grade_) {
      best_ = std::move(solution);
      grade_ = grade;
    }
  }

  /// The drawn order, unless its work without any padding and overlap takes longer already.
  void consider_plain() {
    if (best_ && comm_ == 0.0) {
      std::vector<std::int64_t> loads(static_cast<std::size_t>(speeds_.ranks()), step_.fixed);
      for (std::int64_t sample = 0; sample < step_.samples(); ++sample) {
        loads[rank_in_turn(step_, sample, speeds_.ranks())] += step_.cost[static_cast<std::size_t>(sample)];
      }
      for (std::int64_t rank = 0; rank < speeds_.ranks(); ++rank) {
        if (speeds_.time(loads[static_cast<std::size_t>(rank)], speeds_[rank], step_.exponent) > grade_.makespan) {
          return;
        }
      }
    }
    consider(in_turn(step_, speeds_.ranks()));
  }

  // No padding. Micro-batches cannot always be filled to the brim, but to half of it: any two that could be one exceed
  // the capacity together. So less and less of what they hold is handed out.
  void pack_samples() {
    std::vector<double> room(limits_.capacity.size(), std::numeric_limits<double>::infinity());
    const bool is_unlimited = limits_.micro_batches >= step_.samples();
    const int least_eighths = is_unlimited || limits_.micro_batches == 1 ? 8 : 4;
    for (int eighths = 8; eighths >= least_eighths && !best_; --eighths) {
      if (!is_unlimited) {
        std::transform(limits_.capacity.begin(), limits_.capacity.end(), room.begin(), [&](double capacity) {
          return capacity * (static_cast<double>(limits_.micro_batches) * eighths / 8);
        });
      }
      consider(pack(step_, speeds_, limits_.counts, room, bound_));
    }
    if (limits_.micro_batches > 1) {
      if (!best_ || has_several_micro_batches()) {
        consider(deal_filled(step_, speeds_, limits_));
      }
      consider(pack(step_, speeds_, limits_.counts, limits_.capacity, bound_));  // as with one micro-batch a rank
    }
    if (!best_ || has_several_micro_batches()) {
      consider(repack(step_, speeds_, limits_.counts, limits_.capacity, bound_, in_turn(step_, speeds_.ranks())));
    }
  }

  [[nodiscard]] bool has_several_micro_batches() const {
    return std::any_of(best_->splits.begin(), best_->splits.end(),
                       [](const Split& split) { return split.ends.size() > 1; });
  }

  void deal_micro_batches() {
    const double largest = *std::max_element(limits_.capacity.begin(), limits_.capacity.end());
    CheapestCut cut;
    // Dearer micro-batches make for fewer and longer ones, which the allreduce overlaps with better. Beyond what all
    // samples cost in one of them there are none fewer; and sums of prices must not overflow.
    const std::int64_t dearest =
        std::min(step_.samples() * step_.cost.front(), std::numeric_limits<std::int64_t>::max() / 8 / step_.samples());
    std::int64_t price = step_.fixed;
    std::int64_t previous = 0;
    do {
      if (!cut.solve({step_.cost, step_.size, largest}, price)) {
        break;
      }
      if (cut.batches() != previous) {
        previous = cut.batches();
        Dealer dealer(step_, speeds_, limits_);
        if (dealer.deal(cut.runs(step_.samples()))) {
          improve(dealer);
        }
      }
      price = std::max({std::int64_t{1}, 2 * price, step_.cost.front() / 4});
    } while (comm_ > 0.0 && previous > speeds_.ranks() && price <= dearest);
    if (comm_ > 0.0) {
      deal_around_long_runs(largest);
    }
    cut_into_equal_micro_batches();
    consider_one_batch();
  }

  /// Give every rank one long run, for the allreduce to overlap with, and deal the rest around them.
  void deal_around_long_runs(double largest) {
    CheapestCut cut;
    if (!cut.solve({step_.cost, step_.size, largest}, step_.fixed)) {
      return;
    }
    for (const double share : {0.5, 0.75, 1.0}) {  // of the allreduce that the last backward pass is to cover
      const std::vector<Run> runs = cheapest_long_runs(step_, speeds_, limits_, share * comm_ / kBackwardShare, cut);
      if (runs.empty()) {
        continue;
      }
      std::vector<Run> rest = cut.runs(runs.front().first);
      const std::vector<Run> behind = runs_behind(runs.back().end, largest);
      rest.insert(rest.end(), behind.begin(), behind.end());
      Dealer dealer(step_, speeds_, limits_);
      if (dealer.deal(rest, runs)) {
        improve(dealer);
      }
    }
  }

  /// The cheapest cut of the samples from `first` on.
  [[nodiscard]] std::vector<Run> runs_behind(std::int64_t first, double largest) const {
    const auto begin = static_cast<std::size_t>(first);
    CheapestCut cut;
    cut.solve({std::span(step_.cost).subspan(begin), std::span(step_.size).subspan(begin), largest}, step_.fixed);
    return cut.runs(step_.samples() - first, first);
  }

  void improve(Dealer& dealer) {
    dealer.improve(bound_);
    consider(dealer.shares());
  }

  /// With few micro-batches a rank, a cut into just that many, all ending together, may deal better.
  void cut_into_equal_micro_batches() {
    constexpr std::int64_t kMost = 4;
    if (limits_.micro_batches > kMost && best_) {
      return;
    }
    const std::int64_t most = std::min(limits_.micro_batches, step_.samples() / speeds_.ranks());
    for (std::int64_t each = std::min<std::int64_t>(2, most); each <= most; ++each) {
      if (each > kMost && best_) {
        break;
      }
      std::vector<double> speeds;
      std::vector<double> capacity;
      for (std::int64_t i = 0; i < each; ++i) {
        for (std::int64_t rank = 0; rank < speeds_.ranks(); ++rank) {
          speeds.push_back(static_cast<double>(speeds_[rank]));
          capacity.push_back(limits_.capacity[static_cast<std::size_t>(rank)]);
        }
      }
      const std::int64_t least = (limits_.counts.least + each - 1) / each;
      if (least * each * speeds_.ranks() > step_.samples()) {
        break;
      }
      const Limits limits{{least, step_.samples()}, 1, capacity};
      const auto runs = one_batch_each(step_, Speeds(speeds), limits);
      if (runs) {
        begin_with_runs(*runs);
      }
    }
  }

  /// Run v belongs to rank v mod ranks.
  void begin_with_runs(const Shares& runs) {
    const auto ranks = static_cast<std::size_t>(speeds_.ranks());
    Shares shares(ranks);
    std::vector<std::vector<std::int64_t>> ends(ranks);
    for (std::size_t run = 0; run < runs.size(); ++run) {
      Share& share = shares[run % ranks];
      share.insert(share.end(), runs[run].begin(), runs[run].end());
      ends[run % ranks].push_back(std::ssize(share));
    }
    Dealer dealer(step_, speeds_, limits_);
    dealer.begin_with(shares, ends);
    improve(dealer);
  }

  /// One micro-batch a rank, if that ends earlier than the best found.
  void consider_one_batch() {
    Limits one = limits_;
    one.micro_batches = 1;
    if (!best_ || comm_ > 0.0) {
      consider(one_batch_each(step_, speeds_, one));
      return;
    }
    std::optional<Time> slowest;
    for (std::int64_t rank = 0; rank < speeds_.ranks(); ++rank) {
      const Time time{best_->splits[static_cast<std::size_t>(rank)].load, speeds_[rank]};
      slowest = slowest ? std::max(*slowest, time) : time;
    }
    consider(one_batch_each(step_, speeds_, one, slowest));
  }

  /// Every rank gets its part of the cheap and of the dear samples, as if each cost what it does in the cheapest cut.
  void deal_equal_counts() {
    const std::vector<double> room(limits_.capacity.size(), std::numeric_limits<double>::infinity());
    consider(one_batch_each(step_, speeds_, {limits_.counts, 1, room}));
    if (!best_ || has_several_micro_batches()) {
      consider(one_batch_each(step_, speeds_, {limits_.counts, 1, limits_.capacity}));
    }
    const double largest = *std::max_element(limits_.capacity.begin(), limits_.capacity.end());
    CheapestCut cut;
    if (!cut.solve({step_.cost, step_.size, largest}, step_.fixed)) {
      return;
    }
    Step as_cut = step_;
    as_cut.padded = false;
    for (const Run& run : cut.runs(step_.samples())) {
      std::fill(as_cut.cost.begin() + run.first, as_cut.cost.begin() + run.end,
                step_.cost[static_cast<std::size_t>(run.first)]);
    }
    consider(pack(as_cut, speeds_, limits_.counts, room, bound_));
    as_cut.cost = step_.cost;
    consider(pack(as_cut, speeds_, limits_.counts, room, bound_));
  }

  const Step& step_;
  const Speeds& speeds_;
  const Limits& limits_;
  double comm_;
  Splitter splitter_;
  Time bound_;
  std::optional<Solution> best_;
  Grade grade_;
};

}  // namespace

std::optional<Solution> solve(const Step& step, const Speeds& speeds, const Limits& limits, double comm,
                              const Time& bound) {
  return Solver(step, speeds, limits, comm, bound).best();
}

std::optional<Solution> keep(const Step& step, const Speeds& speeds, const Limits& limits, double comm, Shares shares) {
  Splitter splitter(step, speeds, limits, comm);
  return split_all(splitter, std::move(shares));
}

Shares in_turn(const Step& step, std::int64_t ranks) {
  Shares shares(static_cast<std::size_t>(ranks));
  for (std::int64_t sample = 0; sample < step.samples(); ++sample) {
    shares[rank_in_turn(step, sample, ranks)].push_back(sample);
  }
  return shares;
}

}  // namespace chronica
