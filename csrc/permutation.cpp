#include "permutation.hpp"

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
  for (std::int64_t i = 0; i < n - 1; ++i) {
    std::uint64_t random = engine();
    if (draws_64_bits) {
      random = (random << 32U) | engine();
    }
    const auto offset = static_cast<std::int64_t>(random % static_cast<std::uint64_t>(n - i));
    std::swap(order[static_cast<std::size_t>(i)], order[static_cast<std::size_t>(i + offset)]);
  }
  return order;
}

}  // namespace chronica
