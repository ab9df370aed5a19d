#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "capacity.hpp"
#include "step.hpp"

namespace chronica {

/// Deals padded micro-batches out to the ranks and moves samples between them until the ranks end together.
///
/// A micro-batch that would make its rank late is divided, so a cheap cut of all the step's samples stays cheap: every
/// division costs one micro-batch's fixed cost more. What is then left of the differences is evened out by moves
/// between the rank that finishes last and the others: of a whole micro-batch, of a run of one's largest or smallest
/// samples, or of two micro-batches for each other.
class Dealer {
 public:
  Dealer(const Step& step, const Speeds& speeds, const Limits& limits);

  /// Deal the runs, which are all of the step together with those that ranks have `already`, the fastest rank the
  /// first; false if the limits leave a run no place.
  bool deal(const std::vector<Run>& runs, const std::vector<Run>& already = {});
  /// Start from shares that are cut into micro-batches already: of each rank, where they end in its share.
  void begin_with(const Shares& shares, const std::vector<std::vector<std::int64_t>>& ends);
  /// Relieve the rank that finishes last until it is near `bound` or nobody can take anything from it.
  void improve(const Time& bound);

  [[nodiscard]] Shares shares() const;

 private:
  struct Batch {
    Share samples;
    std::int64_t cost = 0;
  };
  struct Rank {
    std::vector<Batch> batches;
    std::int64_t load = 0;
    std::int64_t count = 0;
  };
  /// A run of samples [first, end) of the giver's batch `from`, which go into the taker's batch `into`, or into a new
  /// one; or the two batches change places.
  struct Move {
    std::size_t from = 0;
    std::size_t into = 0;
    std::int64_t first = 0;
    std::int64_t end = 0;
    bool is_new = false;
    bool is_swap = false;
  };
  /// The best move found so far between two ranks, and when both have ended after it.
  struct Best {
    std::optional<Move> move;
    Time end;
    std::int64_t total = 0;
  };

  bool deal_by(std::int64_t total, const std::vector<Run>& runs, bool is_last_try, std::int64_t& left_over);
  [[nodiscard]] std::optional<std::int64_t> earliest(double size) const;
  bool join(std::int64_t first, std::int64_t end);
  bool fill_up();
  bool relieve(std::int64_t giver, std::int64_t taker);
  void try_moves_from(std::int64_t giver, std::int64_t taker, std::size_t from, Best& best) const;
  void try_runs(std::int64_t giver, std::int64_t taker, Move move, Best& best) const;
  void try_swap(std::int64_t giver, std::int64_t taker, Move move, Best& best) const;
  void offer(std::int64_t giver, std::int64_t taker, const Move& move, std::int64_t given, std::int64_t taken,
             Best& best) const;
  void apply(std::int64_t giver, std::int64_t taker, const Move& move);
  void add(Rank& rank, Share&& samples);
  void recount(Rank& rank) const;

  [[nodiscard]] std::int64_t cost_of(std::int64_t first_sample, std::int64_t count) const {
    return count == 0 ? 0 : step_.fixed + count * step_.cost[static_cast<std::size_t>(first_sample)];
  }
  [[nodiscard]] bool is_small_enough(std::int64_t first_sample, std::int64_t count, std::int64_t rank) const {
    return is_within(limits_.capacity[static_cast<std::size_t>(rank)],
                     step_.size[static_cast<std::size_t>(first_sample)], count);
  }
  [[nodiscard]] const Rank& at(std::int64_t rank) const { return ranks_[static_cast<std::size_t>(rank)]; }
  [[nodiscard]] Rank& at(std::int64_t rank) { return ranks_[static_cast<std::size_t>(rank)]; }
  [[nodiscard]] Time time(std::int64_t rank) const { return {at(rank).load, speeds_[rank]}; }
  [[nodiscard]] bool has_slot(std::int64_t rank) const { return std::ssize(at(rank).batches) < limits_.micro_batches; }

  const Step& step_;
  const Speeds& speeds_;
  const Limits& limits_;
  std::vector<Rank> ranks_;
};

}  // namespace chronica
