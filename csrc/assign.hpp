#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace chronica {

/// What `assign` plans from: some consecutive steps of an epoch. All but the last have `global_batch` samples.
struct Block {
  std::span<const double> costs;   // (samples), marginal cost of each sample in drawn order; finite, not negative
  double fixed_cost = 0.0;         // cost of a micro-batch whatever is in it; finite, not negative
  std::span<const double> speeds;  // (ranks), relative; positive and finite
  std::int64_t global_batch = 1;   // samples in a step; at least the number of ranks
  bool padded = true;              // a rank's load is fixed + n · max cost; else fixed + Σ cost
  bool equal_counts = false;       // every rank takes the same number of samples, or one more in a short step
};

/// Which rank takes which samples. A filler (a rank without real samples) repeats its step's cheapest sample.
struct Assignment {
  std::vector<std::int64_t> positions;  // indices into the block's drawn order: step by step, rank by rank
  std::vector<std::int64_t> offsets;    // (steps · ranks + 1), where each rank's positions begin
  std::vector<std::int64_t> counts;     // (steps · ranks), real samples; 0 for a filler
  std::vector<double> loads;            // (steps · ranks), in the unit of cost ÷ speed
  std::vector<double> lower_bounds;     // (steps), no assignment has a smaller largest load
};

/// Plan a block: pure, deterministic, integer inside. Steps do not depend on each other.
Assignment assign(const Block& block);

}  // namespace chronica
