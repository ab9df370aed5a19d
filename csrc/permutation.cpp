#include "permutation.hpp"

#include <algorithm>
#include <array>
#include <cstddef>
#include <limits>
#include <numeric>
#include <random>
#include <utility>

namespace chronica {

std::vector<std::int64_t> permutation(std::int64_t n, std::uint64_t seed) {
  std::vector<std::int64_t> order(static_cast<std::size_t>(n));
  std::iota(order.begin(), order.end(), std::int64_t{0});

  // torch keeps the low 32 bits of a seed, and draws 64 bits a step once 32 would be visibly uneven.
  std::mt19937 engine(static_cast<std::uint32_t>(seed & 0xffffffffU));
  const bool draws_64_bits = n >= std::numeric_limits<std::uint32_t>::max() / 20;
  // The places are drawn some ahead of the swaps, so that those beyond the processor's caches are on their way by then.
  constexpr std::int64_t kAhead = 64;
  std::array<std::size_t, kAhead> places{};
  for (std::int64_t first = 0; first < n - 1; first += kAhead) {
    const std::int64_t count = std::min(kAhead, n - 1 - first);
    for (std::int64_t i = 0; i < count; ++i) {
      std::uint64_t random = engine();
      if (draws_64_bits) {
        random = (random << 32U) | engine();
      }
      const auto offset = random % static_cast<std::uint64_t>(n - first - i);
      places[static_cast<std::size_t>(i)] = static_cast<std::size_t>(first + i) + offset;
      __builtin_prefetch(&order[places[static_cast<std::size_t>(i)]], 1);
    }
    for (std::int64_t i = 0; i < count; ++i) {
      std::swap(order[static_cast<std::size_t>(first + i)], order[places[static_cast<std::size_t>(i)]]);
    }
  }
  return order;
}

}  // namespace chronica
