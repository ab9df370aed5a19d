#pragma once

#include <cstdint>
#include <optional>

#include "assign.hpp"
#include "solve.hpp"
#include "step.hpp"

namespace chronica {

/// A step without enough samples for all ranks. Some ranks take them, the fastest first; the others compute fillers:
/// the step's cheapest samples once more, as many as a rank has at least (over again, if the step has fewer).
class ShortStep {
 public:
  ShortStep(const Block& block, const Step& step, const Speeds& speeds, const Limits& limits)
      : block_(block), step_(step), speeds_(speeds), limits_(limits) {}

  /// The best solution over how many ranks take real samples; nothing if none keeps the limits.
  [[nodiscard]] std::optional<Solution> solve() const;

 private:
  [[nodiscard]] std::optional<Solution> with_real_ranks(std::int64_t count) const;
  [[nodiscard]] std::optional<Solution> solve_for(std::int64_t count) const;
  [[nodiscard]] Share filler() const;
  [[nodiscard]] double finish(const Solution& solution) const;
  [[nodiscard]] std::int64_t rank_at(std::int64_t place) const;

  const Block& block_;
  const Step& step_;
  const Speeds& speeds_;
  const Limits& limits_;
};

}  // namespace chronica
