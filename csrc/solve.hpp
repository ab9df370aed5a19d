#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "split.hpp"
#include "step.hpp"

namespace chronica {

/// Who takes what in a step, and how each rank computes it.
struct Solution {
  Shares shares;                // (ranks)
  std::vector<Split> splits;    // (ranks)
  std::vector<char> is_filler;  // (ranks), whether a rank's samples do not count
};

/// The best of what the solvers find for a step with at least `limits.counts.least` samples for every rank; nothing if
/// none keeps the limits. Never slower than dealing the drawn order out (sample p to rank p mod ranks), if that keeps
/// them, and never slower than with one micro-batch a rank.
std::optional<Solution> solve(const Step& step, const Speeds& speeds, const Limits& limits, double comm,
                              const Time& bound);

/// The given shares, cut into micro-batches; nothing if one does not fit the limits.
std::optional<Solution> keep(const Step& step, const Speeds& speeds, const Limits& limits, double comm, Shares shares);

/// Deal the drawn order out in turn: sample p to rank p mod ranks.
Shares in_turn(const Step& step, std::int64_t ranks);

}  // namespace chronica
