#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace chronica {

/// Chronica's published policies. Every rank takes the same number of samples; which ones is the policy's choice.
///
/// - static: rank by rank, what fills the rank up to the mean cost of a local batch.
/// - dynamic: a random first sample, then what brings each rank, at its speed, to the rank that finishes last.
/// - guided: the cheapest first, dearer ones to higher ranks; the least padding.
enum class Policy { kStatic, kDynamic, kGuided };

/// What `deal` deals from: one step, or an epoch.
struct Pool {
  std::span<const double> costs;   // (samples), cost of each sample in drawn order; finite, not negative
  double fixed_cost = 0.0;         // cost of a local batch whatever is in it; finite, not negative
  std::span<const double> speeds;  // (ranks), relative; positive and finite
  std::int64_t global_batch = 1;   // samples in a step, all but perhaps the last; a multiple of the ranks
  std::uint64_t seed = 0;          // draws the first samples of `dynamic`, and the order of the steps
};

/// The samples step by step, within a step rank by rank: a permutation of 0 … samples − 1.
///
/// Of a short last step's m samples rank r takes m / ranks, one more if r < m % ranks. It stays last; the whole steps
/// are shuffled once all are built. The same on every platform.
std::vector<std::int64_t> deal(Policy policy, const Pool& pool);

}  // namespace chronica
