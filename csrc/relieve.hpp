#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#include "step.hpp"

namespace chronica {

/// Relieve the rank that finishes last until it is within 2^-`bits` of the bound or nobody can take anything from it.
///
/// `time(rank)` says when a rank finishes; `relieve(giver, taker)` makes an exchange between two of them if one lets
/// both finish earlier than the giver does, and says whether it did. Those that finish first are asked first.
template <class TimeOf, class Relieve>
void relieve_the_last(std::int64_t ranks, const Time& bound, int bits, const TimeOf& time, const Relieve& relieve) {
  const Time near{bound.load + (bound.load >> bits), bound.speed};
  std::vector<std::int64_t> takers(static_cast<std::size_t>(ranks));
  std::iota(takers.begin(), takers.end(), std::int64_t{0});
  const std::int64_t most_rounds = 32 + 4 * ranks;
  for (std::int64_t round = 0; round < most_rounds; ++round) {
    std::stable_sort(takers.begin(), takers.end(),
                     [&time](std::int64_t a, std::int64_t b) { return time(a) < time(b); });
    const std::int64_t giver = takers.back();
    if (!(near < time(giver)) ||
        !std::any_of(takers.begin(), takers.end() - 1, [&](std::int64_t taker) { return relieve(giver, taker); })) {
      return;
    }
  }
}

}  // namespace chronica
