#include "split.hpp"

#include <algorithm>
#include <cstddef>
#include <limits>
#include <numeric>
#include <utility>

#include "capacity.hpp"

namespace chronica {

std::int64_t batch_cost(const Step& step, const Share& share, std::int64_t first, std::int64_t end) {
  const auto cost = [&step](std::int64_t sample) { return step.cost[static_cast<std::size_t>(sample)]; };
  if (step.padded) {
    return step.fixed + (end - first) * cost(share[static_cast<std::size_t>(first)]);
  }
  return std::accumulate(share.begin() + first, share.begin() + end, step.fixed,
                         [&](std::int64_t sum, std::int64_t sample) { return sum + cost(sample); });
}

std::optional<Split> Splitter::split(std::int64_t rank, Share& share) {
  return step_.padded ? split_padded(rank, share) : split_packed(rank, share);
}

double Splitter::finish(std::int64_t rank, const Split& split) const {
  const double load = speeds_.time(split.load, speeds_[rank], step_.exponent);
  const double tail = kBackwardShare * speeds_.time(split.largest, speeds_[rank], step_.exponent);
  return std::max(load, comm_ + (load - tail));
}

std::optional<Split> Splitter::split_padded(std::int64_t rank, const Share& share) {
  const auto count = static_cast<std::int64_t>(share.size());
  const double capacity = limits_.capacity[static_cast<std::size_t>(rank)];
  if (limits_.micro_batches == 1) {
    const bool fits_whole = is_within(capacity, step_.size[static_cast<std::size_t>(share.front())], count);
    return fits_whole ? std::optional(measured(share, {count})) : std::nullopt;
  }
  cost_.resize(share.size());
  size_.resize(share.size());
  for (std::size_t i = 0; i < share.size(); ++i) {
    cost_[i] = step_.cost[static_cast<std::size_t>(share[i])];
    size_[i] = step_.size[static_cast<std::size_t>(share[i])];
  }
  if (!cut_.solve_within({cost_, size_, capacity}, step_.fixed, limits_.micro_batches)) {
    return std::nullopt;
  }
  std::vector<std::int64_t> ends;
  cut_.append_ends(count, ends);
  Split best = measured(share, std::move(ends));
  if (comm_ > 0.0) {
    lengthen_last(rank, share, best);
  }
  return best;
}

/// Try runs as the micro-batch that comes last, the samples before and behind it cut as cheaply as possible: a longer
/// backward pass for the allreduce to overlap with may be worth some padding.
void Splitter::lengthen_last(std::int64_t rank, const Share& share, Split& best) {
  const double capacity = limits_.capacity[static_cast<std::size_t>(rank)];
  cut_.solve({cost_, size_, capacity}, step_.fixed);
  const std::vector<std::int64_t> borders = borders_to_try(std::ssize(share));
  const auto is_allowed = [&](std::size_t i, std::size_t j) {
    return is_within(capacity, size_[static_cast<std::size_t>(borders[i])], borders[j] - borders[i]);
  };
  // The cheapest cut of the samples from each border on.
  struct Behind {
    std::int64_t cost = 0;
    std::int64_t batches = 0;
    std::size_t next = 0;
  };
  std::vector<Behind> behind(borders.size());
  for (std::size_t i = borders.size() - 1; i-- > 0;) {
    behind[i].cost = std::numeric_limits<std::int64_t>::max();
    for (std::size_t j = i + 1; j < borders.size() && is_allowed(i, j); ++j) {
      const std::int64_t cost = batch_cost(step_, share, borders[i], borders[j]);
      if (behind[j].cost <= std::numeric_limits<std::int64_t>::max() - cost && cost + behind[j].cost < behind[i].cost) {
        behind[i] = {cost + behind[j].cost, behind[j].batches + 1, j};
      }
    }
  }
  double earliest = finish(rank, best);
  std::pair<std::size_t, std::size_t> last{0, 0};
  for (std::size_t i = 0; i + 1 < borders.size(); ++i) {
    for (std::size_t j = i + 1; j < borders.size() && is_allowed(i, j); ++j) {
      if (behind[j].cost == std::numeric_limits<std::int64_t>::max() ||
          cut_.batches(borders[i]) + 1 + behind[j].batches > limits_.micro_batches) {
        continue;
      }
      const std::int64_t largest = batch_cost(step_, share, borders[i], borders[j]);
      const Split trial{{}, cut_.cost(borders[i]) + largest + behind[j].cost, largest};
      const double finished = finish(rank, trial);
      if (finished < earliest || (finished == earliest && trial.load < best.load)) {
        earliest = finished;
        best = trial;
        last = {i, j};
      }
    }
  }
  if (best.ends.empty()) {
    cut_.append_ends(borders[last.first], best.ends);
    for (std::size_t j = last.second; j < borders.size(); j = behind[j].next == 0 ? borders.size() : behind[j].next) {
      best.ends.push_back(borders[j]);
    }
    best = measured(share, std::move(best.ends));
  }
}

/// Where a run that comes last may begin and end: everywhere in a short share; in a long one at the borders of its
/// cheapest cut and at some evenly spread.
std::vector<std::int64_t> Splitter::borders_to_try(std::int64_t samples) const {
  constexpr std::int64_t kSpread = 64;
  std::vector<std::int64_t> borders{0};
  if (samples > kSpread) {
    cut_.append_ends(samples, borders);
  }
  const std::int64_t parts = std::min(samples, kSpread);
  for (std::int64_t part = 1; part <= parts; ++part) {
    borders.push_back(samples * part / parts);
  }
  std::sort(borders.begin(), borders.end());
  borders.erase(std::unique(borders.begin(), borders.end()), borders.end());
  return borders;
}

/// Without padding more micro-batches only cost more, so there are as few as the capacity allows, nearly: each sample,
/// the largest first, goes into the first micro-batch with room for it.
std::optional<Split> Splitter::split_packed(std::int64_t rank, Share& share) const {
  const auto size = [this](std::int64_t sample) { return step_.size[static_cast<std::size_t>(sample)]; };
  const double capacity = limits_.capacity[static_cast<std::size_t>(rank)];
  const double total = std::accumulate(share.begin(), share.end(), 0.0,
                                       [&](double sum, std::int64_t sample) { return sum + size(sample); });
  if (total <= capacity) {
    return measured(share, {static_cast<std::int64_t>(share.size())});
  }
  std::stable_sort(share.begin(), share.end(), [&](std::int64_t a, std::int64_t b) { return size(a) > size(b); });
  Shares batches;
  std::vector<double> used;
  for (const std::int64_t sample : share) {
    std::size_t place = 0;
    while (place < batches.size() && used[place] + size(sample) > capacity) {
      ++place;
    }
    if (place == batches.size()) {
      if (size(sample) > capacity || std::ssize(batches) == limits_.micro_batches) {
        return std::nullopt;
      }
      batches.emplace_back();
      used.push_back(0.0);
    }
    batches[place].push_back(sample);
    used[place] += size(sample);
  }
  share.clear();
  std::vector<std::int64_t> ends;
  for (Share& batch : batches) {
    std::sort(batch.begin(), batch.end());
    share.insert(share.end(), batch.begin(), batch.end());
    ends.push_back(static_cast<std::int64_t>(share.size()));
  }
  return measured(share, std::move(ends));
}

Split Splitter::measured(const Share& share, std::vector<std::int64_t> ends) const {
  Split split{std::move(ends), 0, 0};
  std::int64_t first = 0;
  for (const std::int64_t end : split.ends) {
    const std::int64_t cost = batch_cost(step_, share, first, end);
    split.load += cost;
    split.largest = std::max(split.largest, cost);
    first = end;
  }
  return split;
}

}  // namespace chronica
