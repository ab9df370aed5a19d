#pragma once

#include <vector>

#include "cut.hpp"
#include "step.hpp"

namespace chronica {

/// One run of the sorted step for every rank, the fastest rank's first, each as many samples as take the rank at least
/// this time; side by side, where in the step this adds least padding. Nothing if there are not enough samples.
///
/// `cut`: the cheapest cut of the whole step.
std::vector<Run> cheapest_long_runs(const Step& step, const Speeds& speeds, const Limits& limits, double time,
                                    const CheapestCut& cut);

}  // namespace chronica
