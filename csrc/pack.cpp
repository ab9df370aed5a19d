#include "pack.hpp"

#include <algorithm>
#include <cstddef>
#include <functional>
#include <optional>
#include <tuple>

#include "relieve.hpp"

namespace chronica {
namespace {

/// A sample that a rank gives to another, and perhaps one that comes back for it (indices into Step::cost).
struct Exchange {
  std::int64_t give = 0;
  std::optional<std::int64_t> back;
  std::int64_t moved = 0;  // net cost that goes over
};

/// The exchanges that move just below and just above the cost that would level two ranks.
struct Nearest {
  std::optional<Exchange> below;
  std::optional<Exchange> above;

  void offer(const Exchange& exchange, std::int64_t ideal) {
    if (exchange.moved <= ideal) {
      if (!below || exchange.moved > below->moved) {
        below = exchange;
      }
    } else if (!above || exchange.moved < above->moved) {
      above = exchange;
    }
  }
};

class Packer {
 public:
  /// `room`: (ranks), how large the samples of each rank may be together.
  Packer(const Step& step, const Speeds& speeds, CountRange counts, std::span<const double> room)
      : step_(step),
        speeds_(speeds),
        counts_(counts),
        room_(room),
        shares_(static_cast<std::size_t>(speeds.ranks())),
        loads_(static_cast<std::size_t>(speeds.ranks()), step.fixed),
        sizes_(static_cast<std::size_t>(speeds.ranks()), 0.0),
        extras_(step.samples() - counts.least * speeds.ranks()) {
    for (Share& each : shares_) {
      each.reserve(static_cast<std::size_t>(std::min(counts.most, 2 * (step.samples() / speeds.ranks()))));
    }
  }

  /// Longest processing time first (Graham 1969): each sample onto the rank that would finish it first. False if a
  /// sample finds no room; room is looked at only where it is needed.
  bool deal() {
    if (speeds_.uniform()) {
      deal_uniform();
    } else {
      deal_one_by_one(false);
    }
    if (std::equal(sizes_.begin(), sizes_.end(), room_.begin(), std::less_equal<>())) {
      return true;
    }
    clear();
    return deal_one_by_one(true);
  }

  /// Start from these shares instead.
  void begin_with(const Shares& shares) {
    clear();
    for (std::int64_t rank = 0; rank < speeds_.ranks(); ++rank) {
      for (const std::int64_t sample : shares[static_cast<std::size_t>(rank)]) {
        take(rank, sample);
      }
    }
  }

  /// Relieve the rank that finishes last until it is within 2^-14 of the bound or nobody can take anything from it.
  void improve(const Time& bound) {
    constexpr int kNear = 14;
    relieve_the_last(
        speeds_.ranks(), bound, kNear, [this](std::int64_t rank) { return time(rank); },
        [this](std::int64_t giver, std::int64_t taker) { return exchange_between(giver, taker); });
  }

  Shares&& shares() && { return std::move(shares_); }

 private:
  [[nodiscard]] std::vector<std::int64_t>& share(std::int64_t rank) { return shares_[static_cast<std::size_t>(rank)]; }
  [[nodiscard]] std::int64_t& load(std::int64_t rank) { return loads_[static_cast<std::size_t>(rank)]; }
  [[nodiscard]] double& size_on(std::int64_t rank) { return sizes_[static_cast<std::size_t>(rank)]; }
  [[nodiscard]] double room(std::int64_t rank) const { return room_[static_cast<std::size_t>(rank)]; }
  [[nodiscard]] double size(std::int64_t sample) const { return step_.size[static_cast<std::size_t>(sample)]; }
  [[nodiscard]] std::int64_t cost(std::int64_t sample) const { return step_.cost[static_cast<std::size_t>(sample)]; }
  [[nodiscard]] std::int64_t count(std::int64_t rank) { return static_cast<std::int64_t>(share(rank).size()); }
  [[nodiscard]] Time time(std::int64_t rank) { return {load(rank), speeds_[rank]}; }

  /// Once false for a rank it stays false while the step is dealt.
  [[nodiscard]] bool may_take(std::int64_t rank) {
    return count(rank) < counts_.least || (count(rank) < counts_.most && extras_ > 0);
  }

  [[nodiscard]] bool finishes_before(std::int64_t a, std::int64_t b, std::int64_t sample) {
    const Time time_a{load(a) + cost(sample), speeds_[a]};
    const Time time_b{load(b) + cost(sample), speeds_[b]};
    return time_a < time_b || (!(time_b < time_a) && count(a) < count(b));
  }

  void take(std::int64_t rank, std::int64_t sample) {
    if (count(rank) >= counts_.least) {
      --extras_;
    }
    share(rank).push_back(sample);
    load(rank) += cost(sample);
    size_on(rank) += size(sample);
  }

  void clear() {
    for (Share& each : shares_) {
      each.clear();
    }
    std::fill(loads_.begin(), loads_.end(), step_.fixed);
    std::fill(sizes_.begin(), sizes_.end(), 0.0);
    extras_ = step_.samples() - counts_.least * speeds_.ranks();
  }

  bool deal_one_by_one(bool within_room) {
    for (std::int64_t sample = 0; sample < step_.samples(); ++sample) {
      std::optional<std::int64_t> first;
      for (std::int64_t rank = 0; rank < speeds_.ranks(); ++rank) {
        if (may_take(rank) && (!within_room || size_on(rank) + size(sample) <= room(rank)) &&
            (!first || finishes_before(rank, *first, sample))) {
          first = rank;
        }
      }
      if (!first) {
        return false;
      }
      take(*first, sample);
    }
    return true;
  }

  void deal_uniform() {
    using Entry = std::tuple<std::int64_t, std::int64_t, std::int64_t>;  // load, count, rank
    std::vector<Entry> heap;
    for (std::int64_t rank = 0; rank < speeds_.ranks(); ++rank) {
      heap.emplace_back(step_.fixed, 0, rank);
    }
    for (std::int64_t sample = 0; sample < step_.samples(); ++sample) {
      while (!may_take(std::get<2>(heap.front()))) {
        heap.front() = heap.back();
        heap.pop_back();
        sink(heap);
      }
      const std::int64_t rank = std::get<2>(heap.front());
      take(rank, sample);
      heap.front() = {load(rank), count(rank), rank};
      sink(heap);
    }
  }

  /// Restore the order of a heap, the least first, whose first entry has grown.
  template <class Entry>
  static void sink(std::vector<Entry>& heap) {
    std::size_t place = 0;
    const Entry moved = heap.empty() ? Entry{} : heap.front();
    for (std::size_t child = 1; child < heap.size(); child = 2 * place + 1) {
      if (child + 1 < heap.size() && heap[child + 1] < heap[child]) {
        ++child;
      }
      if (!(heap[child] < moved)) {
        break;
      }
      heap[place] = heap[child];
      place = child;
    }
    if (!heap.empty()) {
      heap[place] = moved;
    }
  }

  /// Make the exchange from `giver` to `taker` that lets both end earliest, if it ends before the giver would alone.
  bool exchange_between(std::int64_t giver, std::int64_t taker) {
    const Nearest nearest = nearest_exchanges(giver, taker);
    std::optional<Exchange> best;
    Time earliest = time(giver);
    for (const auto& exchange : {nearest.below, nearest.above}) {
      if (!exchange || exchange->moved <= 0) {
        continue;
      }
      const Time end = std::max(Time{load(giver) - exchange->moved, speeds_[giver]},
                                Time{load(taker) + exchange->moved, speeds_[taker]});
      if (end < earliest) {
        best = exchange;
        earliest = end;
      }
    }
    if (best) {
      apply(*best, giver, taker);
    }
    return best.has_value();
  }

  [[nodiscard]] Nearest nearest_exchanges(std::int64_t giver, std::int64_t taker) {
    // The net cost that would let both end together; shares run from the largest sample to the smallest.
    const Wide surplus = Wide{load(giver)} * speeds_[taker] - Wide{load(taker)} * speeds_[giver];
    const auto ideal = static_cast<std::int64_t>(surplus / (speeds_[giver] + speeds_[taker]));
    const bool may_move = count(giver) > counts_.least && count(taker) < counts_.most;
    const std::vector<std::int64_t>& takers = share(taker);

    Nearest nearest;
    const auto offer = [&](std::int64_t give, std::optional<std::int64_t> back) {
      const double bigger = size(give) - (back ? size(*back) : 0.0);
      if (size_on(taker) + bigger <= room(taker) && size_on(giver) - bigger <= room(giver)) {
        nearest.offer({give, back, cost(give) - (back ? cost(*back) : 0)}, ideal);
      }
    };
    std::size_t smaller = 0;  // the taker's first sample that would come back for at least the ideal
    for (const std::int64_t give : share(giver)) {
      while (smaller < takers.size() && cost(takers[smaller]) > cost(give) - ideal) {
        ++smaller;
      }
      if (smaller < takers.size()) {
        offer(give, takers[smaller]);
      }
      if (smaller > 0) {
        offer(give, takers[smaller - 1]);
      }
      if (may_move) {
        offer(give, std::nullopt);
      }
    }
    return nearest;
  }

  void apply(const Exchange& exchange, std::int64_t giver, std::int64_t taker) {
    transfer(exchange.give, giver, taker);
    if (exchange.back) {
      transfer(*exchange.back, taker, giver);
    }
  }

  void transfer(std::int64_t sample, std::int64_t from, std::int64_t to) {
    auto& source = share(from);
    auto& target = share(to);
    source.erase(std::lower_bound(source.begin(), source.end(), sample));
    target.insert(std::lower_bound(target.begin(), target.end(), sample), sample);
    load(from) -= cost(sample);
    load(to) += cost(sample);
    size_on(from) -= size(sample);
    size_on(to) += size(sample);
  }

  const Step& step_;
  const Speeds& speeds_;
  CountRange counts_;
  std::span<const double> room_;
  Shares shares_;
  std::vector<std::int64_t> loads_;
  std::vector<double> sizes_;
  std::int64_t extras_;  // how many samples go beyond everybody's `least`
};

}  // namespace

std::optional<Shares> pack(const Step& step, const Speeds& speeds, CountRange counts, std::span<const double> room,
                           const Time& bound) {
  Packer packer(step, speeds, counts, room);
  if (!packer.deal()) {
    return std::nullopt;
  }
  packer.improve(bound);
  return std::move(packer).shares();
}

Shares repack(const Step& step, const Speeds& speeds, CountRange counts, std::span<const double> room,
              const Time& bound, const Shares& shares) {
  Packer packer(step, speeds, counts, room);
  packer.begin_with(shares);
  packer.improve(bound);
  return std::move(packer).shares();
}

}  // namespace chronica
