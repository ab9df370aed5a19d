#include "fill.hpp"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <vector>

#include "split.hpp"

namespace chronica {

std::optional<Shares> deal_filled(const Step& step, const Speeds& speeds, const Limits& limits) {
  const double smallest = *std::min_element(limits.capacity.begin(), limits.capacity.end());
  const Speeds one(std::array{1.0});
  const Limits whole{{1, step.samples()}, step.samples(), std::span(&smallest, 1)};
  Share all(static_cast<std::size_t>(step.samples()));
  std::iota(all.begin(), all.end(), std::int64_t{0});
  const auto filled = Splitter(step, one, whole, 0.0).split(0, all);
  if (!filled) {
    return std::nullopt;
  }
  struct Batch {
    std::int64_t cost;
    std::int64_t first;
    std::int64_t end;
  };
  std::vector<Batch> batches;
  std::int64_t first = 0;
  for (const std::int64_t end : filled->ends) {
    batches.push_back({batch_cost(step, all, first, end), first, end});
    first = end;
  }
  std::stable_sort(batches.begin(), batches.end(), [](const Batch& a, const Batch& b) { return a.cost > b.cost; });
  Shares shares(static_cast<std::size_t>(speeds.ranks()));
  std::vector<std::int64_t> loads(shares.size(), 0);
  for (const Batch& batch : batches) {
    std::size_t best = 0;
    for (std::size_t rank = 1; rank < shares.size(); ++rank) {
      if (Time{loads[rank] + batch.cost, speeds[static_cast<std::int64_t>(rank)]} <
          Time{loads[best] + batch.cost, speeds[static_cast<std::int64_t>(best)]}) {
        best = rank;
      }
    }
    loads[best] += batch.cost;
    shares[best].insert(shares[best].end(), all.begin() + batch.first, all.begin() + batch.end);
  }
  for (Share& share : shares) {
    const std::int64_t count = std::ssize(share);
    if (count < limits.counts.least || count > limits.counts.most) {
      return std::nullopt;
    }
    std::sort(share.begin(), share.end());
  }
  return shares;
}

}  // namespace chronica
