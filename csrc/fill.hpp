#pragma once

#include <optional>

#include "step.hpp"

namespace chronica {

/// Without padding, where capacities take several micro-batches a rank: fill them with the samples of the whole step,
/// which leaves less of them empty than filling them rank by rank, and deal these out, the dearest first, each to the
/// rank that would finish it first. Nothing if the ranks' counts are then beyond their limits.
std::optional<Shares> deal_filled(const Step& step, const Speeds& speeds, const Limits& limits);

}  // namespace chronica
