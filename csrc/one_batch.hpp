#pragma once

#include <optional>

#include "step.hpp"

namespace chronica {

/// Deal the samples out as one padded batch a rank: contiguous cuts of the size-sorted step with the least makespan,
/// and among those little total load and even counts. Nothing if the limits allow none, or none faster than `below`.
///
/// The makespan is exact for ranks of at most a few different speeds; with more orders of the speeds than can be tried,
/// one that exchanges of ranks do not improve. Ranks of the same speed must have the same capacity.
std::optional<Shares> one_batch_each(const Step& step, const Speeds& speeds, const Limits& limits,
                                     std::optional<Time> below = std::nullopt);

}  // namespace chronica
