#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "step.hpp"

namespace chronica {

/// Size-sorted samples to be cut, largest first, and the largest micro-batch allowed.
struct Samples {
  std::span<const std::int64_t> cost;
  std::span<const double> size;
  double capacity = 0.0;
};

/// The cheapest cut of size-sorted samples into padded micro-batches: one of them costs `price` + n · its largest.
///
/// Contiguous cuts are enough. The transitions of the dynamic programme over the end of the last micro-batch are lines
/// of falling slope, asked at rising places, and a line ends where its micro-batch would be too large, the earlier
/// the further to the left it begins. So one line overtakes another at most once, and a queue of the lines that will
/// still be lowest, each with the place from which on it is, makes every cut in linear time (a monotone queue for a
/// totally monotone problem: Galil and Park 1992, "Dynamic programming with convexity, concavity and sparsity").
class CheapestCut {
 public:
  /// Cut all samples; false if one of them is larger than the capacity.
  bool solve(const Samples& samples, std::int64_t price);
  /// The same with at most `most` micro-batches; false if that is impossible. Linear in samples · `most`.
  bool solve_within(const Samples& samples, std::int64_t price, std::int64_t most);

  /// Cost of the cheapest cut of the first `end` samples (of all of them), prices included.
  [[nodiscard]] std::int64_t cost(std::int64_t end) const { return cost_[static_cast<std::size_t>(end)]; }
  [[nodiscard]] std::int64_t cost() const { return cost_.back(); }
  /// How many micro-batches it has.
  [[nodiscard]] std::int64_t batches(std::int64_t end) const { return batches_[static_cast<std::size_t>(end)]; }
  [[nodiscard]] std::int64_t batches() const { return batches_.back(); }
  /// Append where each micro-batch of the cheapest cut of the first `end` samples ends, ascending.
  void append_ends(std::int64_t end, std::vector<std::int64_t>& ends) const;
  /// The same as runs, where the samples begin at `offset` of the step.
  [[nodiscard]] std::vector<Run> runs(std::int64_t end, std::int64_t offset = 0) const;

 private:
  /// A micro-batch that begins at sample `first`: ending before sample x it costs base + (x − first) · slope.
  struct Line {
    std::int64_t first;
    std::int64_t base;
    std::int64_t slope;
    std::int64_t last;  // the largest x it may have
    std::int64_t from;  // where it overtakes the line before it in the queue

    [[nodiscard]] std::int64_t at(std::int64_t x) const noexcept { return base + (x - first) * slope; }
  };

  static std::int64_t overtakes_at(const Line& older, const Line& newer) noexcept;
  void push(const Line& line);
  static Line line_from(const Samples& samples, std::int64_t first, std::int64_t base);
  void advance(std::int64_t end);

  std::vector<Line> queue_;
  std::size_t lowest_ = 0;
  std::vector<std::int64_t> cost_;     // (samples + 1)
  std::vector<std::int64_t> batches_;  // (samples + 1)
  std::vector<std::int64_t> first_;    // (samples + 1), where the last micro-batch begins; by layers in solve_within
  std::int64_t layers_ = 0;            // 0: one table for any number of micro-batches
};

/// The least cost of the step in padded micro-batches, fixed costs included: at least `least` and at most `most` of
/// them, each within `capacity`; or a bound below it.
///
/// By convexity in their number (the quadrangle inequality) the best extra price per micro-batch is found by bisection;
/// every price gives a bound (Lagrange), and one of those around the turning point gives the least cost itself.
std::int64_t cheapest_total(const Step& step, std::int64_t least, std::int64_t most, double capacity);

}  // namespace chronica
