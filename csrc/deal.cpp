#include "deal.hpp"

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <numeric>
#include <utility>

#include "relieve.hpp"

namespace chronica {
namespace {

Share samples_of(const Run& run) {
  Share samples(static_cast<std::size_t>(run.end - run.first));
  std::iota(samples.begin(), samples.end(), run.first);
  return samples;
}

void insert(Share& samples, std::int64_t sample) {
  samples.insert(std::upper_bound(samples.begin(), samples.end(), sample), sample);
}

}  // namespace

Dealer::Dealer(const Step& step, const Speeds& speeds, const Limits& limits)
    : step_(step), speeds_(speeds), limits_(limits), ranks_(static_cast<std::size_t>(speeds.ranks())) {}

bool Dealer::deal(const std::vector<Run>& runs, const std::vector<Run>& already) {
  std::int64_t total = 0;
  for (const Run& run : runs) {
    total += cost_of(run.first, run.end - run.first);
  }
  for (const Run& run : already) {
    total += cost_of(run.first, run.end - run.first);
  }
  // Divided micro-batches cost more, so the first tries leave something over; each next one allows for that.
  constexpr int kTries = 4;
  for (int attempt = 1; attempt <= kTries; ++attempt) {
    std::int64_t left_over = 0;
    ranks_.assign(ranks_.size(), Rank{});
    for (std::size_t i = 0; i < already.size(); ++i) {
      add(at(speeds_.fastest_first()[i]), samples_of(already[i]));
    }
    if (!deal_by(total, runs, attempt == kTries, left_over)) {
      return false;
    }
    if (left_over == 0) {
      break;
    }
    total += left_over;
  }
  return fill_up();
}

/// Deal with a part of `total`, by its speed, as each rank's aim; what then finds no place is left over, or with the
/// last try goes to the rank that finishes first.
bool Dealer::deal_by(std::int64_t total, const std::vector<Run>& runs, bool is_last_try, std::int64_t& left_over) {
  for (const Run& run : runs) {
    const std::int64_t end = run.end;
    std::int64_t first = run.first;
    while (first < end) {
      const auto rank = earliest(step_.size[static_cast<std::size_t>(first)]);
      if (!rank) {
        if (!join(first, end)) {
          return false;
        }
        first = end;
        break;
      }
      const std::int64_t cost = step_.cost[static_cast<std::size_t>(first)];
      std::int64_t count = most_within(limits_.capacity[static_cast<std::size_t>(*rank)],
                                       step_.size[static_cast<std::size_t>(first)], end - first);
      const auto aim = static_cast<std::int64_t>(Wide{total} * speeds_[*rank] / speeds_.sum());
      const std::int64_t room = aim - at(*rank).load - step_.fixed;
      if (cost > 0 && count * cost > room) {
        const std::int64_t fitting = std::max<std::int64_t>(room, 0) / cost;
        if (fitting == 0 && !at(*rank).batches.empty() && !is_last_try) {
          left_over += cost_of(first, end - first);
          first = end;
          break;
        }
        // A sample that is more than a rank's aim goes alone; crumbs are not made smaller than a fixed cost.
        count = std::min(count, std::max({std::int64_t{1}, fitting, is_last_try ? step_.fixed / cost : 0}));
      }
      add(at(*rank), samples_of({first, first + count}));
      first += count;
    }
  }
  return true;
}

/// The rank that finishes first, of those that may begin a micro-batch with a sample of this size.
std::optional<std::int64_t> Dealer::earliest(double size) const {
  std::optional<std::int64_t> best;
  for (std::int64_t rank = 0; rank < speeds_.ranks(); ++rank) {
    if (has_slot(rank) && size <= limits_.capacity[static_cast<std::size_t>(rank)] &&
        (!best || time(rank) < time(*best))) {
      best = rank;
    }
  }
  return best;
}

/// With no micro-batch left to begin: put samples into those that are there, each where it costs least.
bool Dealer::join(std::int64_t first, std::int64_t end) {
  for (std::int64_t sample = first; sample < end; ++sample) {
    Rank* rank = nullptr;
    std::size_t place = 0;
    std::int64_t least = 0;
    for (std::int64_t r = 0; r < speeds_.ranks(); ++r) {
      for (std::size_t b = 0; b < at(r).batches.size(); ++b) {
        const Batch& batch = at(r).batches[b];
        const std::int64_t count = std::ssize(batch.samples) + 1;
        const std::int64_t largest = std::min(batch.samples.front(), sample);
        const std::int64_t more = cost_of(largest, count) - batch.cost;
        if ((rank == nullptr || more < least) && is_small_enough(largest, count, r)) {
          rank = &at(r);
          place = b;
          least = more;
        }
      }
    }
    if (rank == nullptr) {
      return false;
    }
    insert(rank->batches[place].samples, sample);
    recount(*rank);
  }
  return true;
}

/// Give ranks with fewer samples than everybody must have the smallest ones of those that finish last.
bool Dealer::fill_up() {
  for (std::int64_t poor = 0; poor < speeds_.ranks(); ++poor) {
    while (at(poor).count < limits_.counts.least) {
      std::optional<std::int64_t> donor;
      for (std::int64_t rank = 0; rank < speeds_.ranks(); ++rank) {
        if (at(rank).count > limits_.counts.least && (!donor || time(*donor) < time(rank))) {
          donor = rank;
        }
      }
      if (!donor) {
        return false;
      }
      auto& batches = at(*donor).batches;
      auto smallest = std::max_element(batches.begin(), batches.end(), [](const Batch& a, const Batch& b) {
        return a.samples.back() < b.samples.back();
      });
      const std::int64_t sample = smallest->samples.back();
      smallest->samples.pop_back();
      if (smallest->samples.empty()) {
        batches.erase(smallest);
      }
      recount(at(*donor));

      auto& own = at(poor).batches;
      auto joined = std::find_if(own.begin(), own.end(), [&](const Batch& batch) {
        return is_small_enough(std::min(batch.samples.front(), sample), std::ssize(batch.samples) + 1, poor);
      });
      if (joined != own.end()) {
        insert(joined->samples, sample);
        recount(at(poor));
      } else if (has_slot(poor) && is_small_enough(sample, 1, poor)) {
        add(at(poor), {sample});
      } else {
        return false;
      }
    }
  }
  return true;
}

void Dealer::begin_with(const Shares& shares, const std::vector<std::vector<std::int64_t>>& ends) {
  ranks_.assign(ranks_.size(), Rank{});
  for (std::size_t rank = 0; rank < shares.size(); ++rank) {
    auto first = shares[rank].begin();
    for (const std::int64_t end : ends[rank]) {
      add(ranks_[rank], Share(first, shares[rank].begin() + end));
      first = shares[rank].begin() + end;
    }
  }
}

void Dealer::improve(const Time& bound) {
  constexpr int kNear = 12;
  relieve_the_last(
      speeds_.ranks(), bound, kNear, [this](std::int64_t rank) { return time(rank); },
      [this](std::int64_t giver, std::int64_t taker) { return relieve(giver, taker); });
}

/// Make the move from `giver` to `taker` that lets both end earliest, if there is one that ends before the giver would.
bool Dealer::relieve(std::int64_t giver, std::int64_t taker) {
  Best best{std::nullopt, time(giver), 0};
  for (std::size_t from = 0; from < at(giver).batches.size(); ++from) {
    try_moves_from(giver, taker, from, best);
  }
  if (best.move) {
    apply(giver, taker, *best.move);
  }
  return best.move.has_value();
}

void Dealer::try_moves_from(std::int64_t giver, std::int64_t taker, std::size_t from, Best& best) const {
  for (std::size_t into = 0; into < at(taker).batches.size(); ++into) {
    try_runs(giver, taker, {from, into, 0, 0, false, false}, best);
    try_swap(giver, taker, {from, into, 0, 0, false, true}, best);
  }
  if (has_slot(taker)) {
    try_runs(giver, taker, {from, 0, 0, 0, true, false}, best);
  }
}

/// Try runs of the largest and of the smallest samples of a batch, of about the count that would level both ranks.
void Dealer::try_runs(std::int64_t giver, std::int64_t taker, Move move, Best& best) const {
  const Share& source = at(giver).batches[move.from].samples;
  const Share* const target = move.is_new ? nullptr : &at(taker).batches[move.into].samples;
  const std::int64_t present = target == nullptr ? 0 : std::ssize(*target);
  const std::int64_t held = std::ssize(source);
  const std::int64_t most = std::min(held, at(giver).count - limits_.counts.least);

  const auto attempt = [&](std::int64_t first, std::int64_t end) {
    const std::int64_t count = end - first;
    const std::int64_t largest = target == nullptr ? source[static_cast<std::size_t>(first)]
                                                   : std::min(target->front(), source[static_cast<std::size_t>(first)]);
    if (!is_small_enough(largest, present + count, taker)) {
      return;
    }
    const std::int64_t kept_first = first > 0 ? source.front() : source[static_cast<std::size_t>(end % held)];
    const std::int64_t given = cost_of(source.front(), held) - cost_of(kept_first, held - count);
    const std::int64_t before = target == nullptr ? 0 : cost_of(target->front(), present);
    move.first = first;
    move.end = end;
    offer(giver, taker, move, given, cost_of(largest, present + count) - before, best);
  };

  // What one sample less or more changes: count · (a ÷ speed of the giver + b ÷ speed of the taker) = the gap.
  const std::int64_t out = step_.cost[static_cast<std::size_t>(source.front())];
  const std::int64_t in = target == nullptr ? out : step_.cost[static_cast<std::size_t>(target->front())];
  const Wide gap =
      Wide{at(giver).load} * speeds_[taker] - Wide{at(taker).load + (move.is_new ? step_.fixed : 0)} * speeds_[giver];
  const Wide rate = Wide{out} * speeds_[taker] + Wide{in} * speeds_[giver];
  const auto level = static_cast<std::int64_t>(gap <= 0 || rate == 0 ? 0 : std::min<Wide>(gap / rate, held));
  for (const std::int64_t count : {level, level + 1}) {
    if (count >= 1 && count < held && count <= most) {
      attempt(0, count);
      attempt(held - count, held);
    }
  }
  if (held <= most) {
    attempt(0, held);
  }
}

void Dealer::try_swap(std::int64_t giver, std::int64_t taker, Move move, Best& best) const {
  const Batch& own = at(giver).batches[move.from];
  const Batch& other = at(taker).batches[move.into];
  const std::int64_t difference = std::ssize(own.samples) - std::ssize(other.samples);
  if (own.cost <= other.cost || at(giver).count - difference < limits_.counts.least ||
      at(taker).count + difference < limits_.counts.least ||
      !is_small_enough(own.samples.front(), std::ssize(own.samples), taker) ||
      !is_small_enough(other.samples.front(), std::ssize(other.samples), giver)) {
    return;
  }
  offer(giver, taker, move, own.cost - other.cost, own.cost - other.cost, best);
}

void Dealer::offer(std::int64_t giver, std::int64_t taker, const Move& move, std::int64_t given, std::int64_t taken,
                   Best& best) const {
  const Time end = std::max(Time{at(giver).load - given, speeds_[giver]}, Time{at(taker).load + taken, speeds_[taker]});
  const std::int64_t total = taken - given;
  if (end < best.end || (best.move && !(best.end < end) && total < best.total)) {
    best = {move, end, total};
  }
}

void Dealer::apply(std::int64_t giver, std::int64_t taker, const Move& move) {
  Rank& source = at(giver);
  Rank& target = at(taker);
  if (move.is_swap) {
    std::swap(source.batches[move.from], target.batches[move.into]);
  } else {
    Share& given = source.batches[move.from].samples;
    const auto first = given.begin() + move.first;
    const auto end = given.begin() + move.end;
    if (move.is_new) {
      target.batches.push_back({Share(first, end), 0});
    } else {
      Share& kept = target.batches[move.into].samples;
      const auto middle = std::ssize(kept);
      kept.insert(kept.end(), first, end);
      std::inplace_merge(kept.begin(), kept.begin() + middle, kept.end());
    }
    given.erase(first, end);
    if (given.empty()) {
      source.batches.erase(source.batches.begin() + static_cast<std::ptrdiff_t>(move.from));
    }
  }
  recount(source);
  recount(target);
}

void Dealer::add(Rank& rank, Share&& samples) {
  const std::int64_t cost = cost_of(samples.front(), std::ssize(samples));
  rank.load += cost;
  rank.count += std::ssize(samples);
  rank.batches.push_back({std::move(samples), cost});
}

void Dealer::recount(Rank& rank) const {
  rank.load = 0;
  rank.count = 0;
  for (Batch& batch : rank.batches) {
    batch.cost = cost_of(batch.samples.front(), std::ssize(batch.samples));
    rank.load += batch.cost;
    rank.count += std::ssize(batch.samples);
  }
}

Shares Dealer::shares() const {
  Shares result(ranks_.size());
  for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
    for (const Batch& batch : ranks_[rank].batches) {
      result[rank].insert(result[rank].end(), batch.samples.begin(), batch.samples.end());
    }
    std::sort(result[rank].begin(), result[rank].end());
  }
  return result;
}

}  // namespace chronica
