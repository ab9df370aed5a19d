#pragma once

#include <optional>
#include <span>

#include "step.hpp"

namespace chronica {

/// Deal the samples out so that the ranks' summed costs end together: longest first onto the rank that would finish
/// first, then moves and swaps with the rank that finishes last, until it is near `bound` or no exchange helps.
/// Every rank takes a count within `counts` and samples that are together no larger than its `room`; nothing if a
/// sample found none.
std::optional<Shares> pack(const Step& step, const Speeds& speeds, CountRange counts, std::span<const double> room,
                           const Time& bound);

/// Only the moves and swaps, from shares that keep the limits.
Shares repack(const Step& step, const Speeds& speeds, CountRange counts, std::span<const double> room,
              const Time& bound, const Shares& shares);

}  // namespace chronica
