#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <random>
#include <span>
#include <vector>

#include "step.hpp"

/// What the tests of the planner draw their steps from.
namespace draw {

using Engine = std::mt19937_64;

inline std::int64_t between(Engine& engine, std::int64_t least, std::int64_t most) {
  return least + static_cast<std::int64_t>(engine() % static_cast<std::uint64_t>(most - least + 1));
}

constexpr int kKinds = 5;

/// Sizes of one of the kinds: a heavy tail, few that repeat, all alike, zeros among them, one giant of 2^40.
inline std::vector<double> sizes(Engine& engine, std::int64_t samples, int kind) {
  std::lognormal_distribution<double> heavy(3.0, 1.2);
  std::vector<double> drawn(static_cast<std::size_t>(samples), 7.0);
  for (double& size : drawn) {
    switch (kind) {
      case 1:
        size = static_cast<double>(between(engine, 1, 4));
        break;
      case 2:
        break;
      case 3:
        size = static_cast<double>(between(engine, 0, 3));
        break;
      default:
        size = std::ceil(heavy(engine));
    }
  }
  if (kind == 4) {
    drawn[engine() % drawn.size()] = std::ldexp(1.0, 40);
  }
  return drawn;
}

/// All of speed 1, or of `kinds` speeds that are no simple ratios.
inline std::vector<double> speeds(std::int64_t ranks, std::int64_t kinds) {
  std::vector<double> given(static_cast<std::size_t>(ranks), 1.0);
  for (std::size_t rank = 0; rank < given.size(); ++rank) {
    given[rank] = 1.0 / (1.0 + 0.7 * static_cast<double>(rank % static_cast<std::size_t>(kinds)));
  }
  return given;
}

/// A padded step of samples that cost what they are long.
inline chronica::Step padded(std::span<const double> sizes, double fixed, std::int64_t ranks) {
  return {sizes, sizes, fixed, ranks, true};
}

}  // namespace draw
