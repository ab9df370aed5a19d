#pragma once

#include "bounds.hpp"
#include "step.hpp"

namespace chronica {

/// Deal the samples out so that the ranks' summed costs end together: longest first onto the rank that would finish
/// first, then moves and swaps with the rank that finishes last, until it is near `bound` or no exchange helps.
/// Every rank takes a count within `counts`.
Shares pack(const Step& step, const Speeds& speeds, CountRange counts, const Time& bound);

}  // namespace chronica
