#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace chronica {

/// What `assign` plans from: some consecutive steps of an epoch. All but the last have `global_batch` samples.
struct Block {
  std::span<const double> costs;     // (samples), marginal cost of each sample in drawn order; finite, not negative
  std::span<const double> sizes;     // (samples), what counts towards `capacity` and, with padding, towards the cost
  double fixed_cost = 0.0;           // cost of a micro-batch whatever is in it; finite, not negative
  std::span<const double> speeds;    // (ranks), relative; positive and finite
  std::span<const double> capacity;  // (ranks), largest n · max size (padded) or Σ size of a micro-batch
  bool is_hard = false;              // a step that cannot keep the capacity is an error; else it may exceed it
  std::int64_t global_batch = 1;     // samples in a step; at least the number of ranks
  std::int64_t least = 1;            // samples a rank takes at least, where the step has enough
  std::int64_t micro_batches = 1;    // at most, on a rank in a step
  double comm = 0.0;                 // duration of the allreduce, in the unit of cost ÷ speed
  bool padded = true;                // a micro-batch costs fixed + n · its largest cost; else fixed + Σ cost
  bool equal_counts = false;         // every rank takes the same number of samples, or one more in a short step
  bool is_dealt = false;             // the drawn order is by ranks already; only micro-batches are to be cut
};

/// Which rank takes which samples. A rank without real samples has fillers: its step's cheapest samples once more.
struct Assignment {
  std::vector<std::int64_t> positions;  // indices into the block's drawn order, micro-batch by micro-batch
  std::vector<std::int64_t> sizes;      // (micro-batches), samples in each
  std::vector<double> lengths;          // (micro-batches), the longest sample of each (padded), or their summed size
  std::vector<std::int64_t> parts;      // (steps · ranks), micro-batches of each rank; the most expensive comes last
  std::vector<std::int64_t> counts;     // (steps · ranks), real samples; 0 for fillers
  std::vector<double> loads;            // (steps · ranks), in the unit of cost ÷ speed
  std::vector<double> tails;            // (steps · ranks), the last micro-batch's backward pass
  std::vector<double> lower_bounds;     // (steps), no assignment has a smaller largest load
  std::int64_t infeasible_step = -1;    // the first step that cannot keep a hard capacity
};

/// Plan a block on so many threads: pure, deterministic, integer inside. Steps do not depend on each other.
Assignment assign(const Block& block, std::int64_t threads = 1);

}  // namespace chronica
