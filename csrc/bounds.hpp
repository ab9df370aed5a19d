#pragma once

#include "step.hpp"

namespace chronica {

/// A time that no assignment of this step can beat, for uniform machines (Q||Cmax) with these counts and numbers of
/// micro-batches. `capacity`: what no micro-batch can exceed; infinity where that is not certain.
Time lower_bound(const Step& step, const Speeds& speeds, CountRange counts, std::int64_t micro_batches,
                 double capacity);

}  // namespace chronica
