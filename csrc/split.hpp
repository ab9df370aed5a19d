#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "cut.hpp"
#include "step.hpp"

namespace chronica {

/// The share of a micro-batch's cost that its backward pass is: twice the forward's matrix products.
constexpr double kBackwardShare = 2.0 / 3.0;

/// How a rank computes its share: where each micro-batch ends in it, what all cost, and what the largest costs.
struct Split {
  std::vector<std::int64_t> ends;
  std::int64_t load = 0;
  std::int64_t largest = 0;
};

/// What a micro-batch of these samples of a share costs.
std::int64_t batch_cost(const Step& step, const Share& share, std::int64_t first, std::int64_t end);

/// Cuts the share of a rank into micro-batches.
class Splitter {
 public:
  /// `comm`: the duration of the allreduce, in the caller's unit of cost ÷ speed.
  Splitter(const Step& step, const Speeds& speeds, const Limits& limits, double comm)
      : step_(step), speeds_(speeds), limits_(limits), comm_(comm) {}

  /// The way to compute a share in which the rank holds up the step least; nothing if it does not fit its limits.
  /// Without padding the share is put in order, micro-batch by micro-batch; with it the share is cut as it stands.
  std::optional<Split> split(std::int64_t rank, Share& share);

  /// The end of a step in which this rank is the slowest: max(T, comm + T − d), T its load, d the last backward pass.
  [[nodiscard]] double finish(std::int64_t rank, const Split& split) const;

 private:
  [[nodiscard]] std::optional<Split> split_padded(std::int64_t rank, const Share& share);
  [[nodiscard]] std::optional<Split> split_packed(std::int64_t rank, Share& share) const;
  [[nodiscard]] Split measured(const Share& share, std::vector<std::int64_t> ends) const;
  void lengthen_last(std::int64_t rank, const Share& share, Split& best);
  [[nodiscard]] std::vector<std::int64_t> borders_to_try(std::int64_t samples) const;

  const Step& step_;
  const Speeds& speeds_;
  const Limits& limits_;
  double comm_;
  CheapestCut cut_;
  std::vector<std::int64_t> cost_;
  std::vector<double> size_;
};

}  // namespace chronica
