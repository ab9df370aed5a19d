#pragma once

#include "step.hpp"

namespace chronica {

/// The least total padded cost Σ n · max of the step's samples in at most `batches` padded batches, without fixed
/// costs.
///
/// Contiguous cuts of the size-sorted samples are enough, and the cost is convex in the number of batches (it satisfies
/// the quadrangle inequality), so the best price per batch is found by bisection, each trial in linear time.
std::int64_t cheapest_cut(const Step& step, std::int64_t batches);

/// Deal the samples out as one padded batch a rank: contiguous cuts of the size-sorted step with the least makespan.
///
/// Exact for ranks of at most a few different speeds; with more orders of the speeds than can be tried, the faster rank
/// gets the larger samples. Every rank takes a count within `counts`.
Shares cut_padded(const Step& step, const Speeds& speeds, CountRange counts);

}  // namespace chronica
