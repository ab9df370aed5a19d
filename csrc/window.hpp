#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace chronica {

/// What `regroup` works on: some consecutive steps of an epoch, every one of them full.
struct Window {
  std::span<const double> costs;   // (samples), cost of each sample in drawn order; finite, not negative
  double fixed_cost = 0.0;         // cost of a micro-batch whatever is in it; finite, not negative
  std::span<const double> speeds;  // (ranks), relative; positive and finite
  std::int64_t global_batch = 1;   // samples in a step; at least the number of ranks
  std::int64_t most_moved = 0;     // samples that may change their step
};

/// Move samples between the steps of a window so that fewer steps wait for their one largest sample: the sum over steps
/// of max(largest sample ÷ fastest rank, all samples ÷ all ranks) never grows. Pure, deterministic, integer inside.
///
/// Returns the new drawn order (samples), positions into `costs`: step k holds entries [k · global_batch,
/// (k + 1) · global_batch). A sample that stays in its step keeps its place.
std::vector<std::int64_t> regroup(const Window& window);

}  // namespace chronica
