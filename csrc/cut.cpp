#include "cut.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <iterator>
#include <limits>

#include "capacity.hpp"

namespace chronica {
namespace {

constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();

std::int64_t floor_divide(std::int64_t value, std::int64_t by) noexcept {
  return value / by - (value % by < 0 ? 1 : 0);
}

/// A number between two, by their orders of magnitude while these differ.
std::int64_t between(std::int64_t low, std::int64_t high) noexcept {
  if (low >= 0 && high / 2 > low + 1) {
    const double middle = std::sqrt(static_cast<double>(low + 1)) * std::sqrt(static_cast<double>(high));
    return std::clamp(static_cast<std::int64_t>(middle), low + 1, high - 1);
  }
  return low + (high - low) / 2;
}

/// How many samples from `first` on one micro-batch may hold.
std::int64_t room(const Samples& samples, std::int64_t first) noexcept {
  return most_within(samples.capacity, samples.size[static_cast<std::size_t>(first)], std::ssize(samples.cost) - first);
}

/// The least number of micro-batches for samples that each fit alone.
std::int64_t fewest_batches(const Samples& samples) noexcept {
  std::int64_t batches = 0;
  for (std::int64_t first = 0; first < std::ssize(samples.cost); first += room(samples, first)) {
    ++batches;
  }
  return batches;
}

}  // namespace

/// The first x at which `newer` is cheaper than `older`, or `older` is not allowed any more.
std::int64_t CheapestCut::overtakes_at(const Line& older, const Line& newer) noexcept {
  const std::int64_t lead = newer.base - older.at(newer.first);  // of the older line where the newer one begins
  std::int64_t place = newer.first + 1;
  if (older.slope > newer.slope) {
    place = std::max(place, newer.first + floor_divide(lead, older.slope - newer.slope) + 1);
  } else if (lead >= 0) {
    place = kNever;
  }
  return std::min(place, std::max(older.last, newer.first) + 1);
}

void CheapestCut::push(const Line& line) {
  Line added = line;
  while (queue_.size() > lowest_) {
    added.from = overtakes_at(queue_.back(), line);
    if (queue_.size() == lowest_ + 1 || added.from > queue_.back().from) {
      break;
    }
    queue_.pop_back();
  }
  queue_.push_back(added);
}

CheapestCut::Line CheapestCut::line_from(const Samples& samples, std::int64_t first, std::int64_t base) {
  return {first, base, samples.cost[static_cast<std::size_t>(first)], first + room(samples, first), 0};
}

void CheapestCut::advance(std::int64_t end) {
  while (lowest_ + 1 < queue_.size() && queue_[lowest_ + 1].from <= end) {
    ++lowest_;
  }
}

bool CheapestCut::solve(const Samples& samples, std::int64_t price) {
  const std::size_t count = samples.cost.size();
  queue_.clear();
  lowest_ = 0;
  layers_ = 0;
  cost_.assign(count + 1, 0);
  batches_.assign(count + 1, 0);
  first_.assign(count + 1, 0);
  for (std::size_t end = 1; end <= count; ++end) {
    push(line_from(samples, static_cast<std::int64_t>(end) - 1, cost_[end - 1] + price));
    advance(static_cast<std::int64_t>(end));
    const Line& line = queue_[lowest_];
    if (line.last < static_cast<std::int64_t>(end)) {
      return false;
    }
    cost_[end] = line.at(static_cast<std::int64_t>(end));
    first_[end] = line.first;
    batches_[end] = batches_[static_cast<std::size_t>(line.first)] + 1;
  }
  return true;
}

bool CheapestCut::solve_within(const Samples& samples, std::int64_t price, std::int64_t most) {
  if (solve(samples, price) && batches() <= most) {
    return true;
  }
  const std::size_t count = samples.cost.size();
  layers_ = std::min(most, static_cast<std::int64_t>(count));
  first_.assign(static_cast<std::size_t>(layers_) * (count + 1), 0);
  std::vector<std::int64_t> before(count + 1, kNever);
  before[0] = 0;
  std::vector<std::int64_t> layer(count + 1);
  for (std::int64_t k = 0; k < layers_; ++k) {
    queue_.clear();
    lowest_ = 0;
    layer.assign(count + 1, kNever);
    for (std::size_t end = 1; end <= count; ++end) {
      if (before[end - 1] != kNever) {
        push(line_from(samples, static_cast<std::int64_t>(end) - 1, before[end - 1] + price));
      }
      advance(static_cast<std::int64_t>(end));
      if (lowest_ < queue_.size() && queue_[lowest_].last >= static_cast<std::int64_t>(end)) {
        layer[end] = queue_[lowest_].at(static_cast<std::int64_t>(end));
        first_[static_cast<std::size_t>(k) * (count + 1) + end] = queue_[lowest_].first;
      }
    }
    before.swap(layer);
  }
  // Fewer than `layers_` micro-batches would have been found by solve(): the cost falls up to the number found there.
  cost_ = before;
  batches_.assign(count + 1, layers_);
  return cost_.back() != kNever;
}

void CheapestCut::append_ends(std::int64_t end, std::vector<std::int64_t>& ends) const {
  const std::size_t begin = ends.size();
  const std::size_t width = cost_.size();
  std::int64_t layer = layers_;
  while (end > 0) {
    ends.push_back(end);
    layer = std::max<std::int64_t>(layer - 1, 0);
    end = first_[static_cast<std::size_t>(layer) * width + static_cast<std::size_t>(end)];
  }
  std::reverse(ends.begin() + static_cast<std::ptrdiff_t>(begin), ends.end());
}

std::vector<Run> CheapestCut::runs(std::int64_t end, std::int64_t offset) const {
  std::vector<std::int64_t> ends;
  append_ends(end, ends);
  std::vector<Run> runs;
  std::int64_t first = 0;
  for (const std::int64_t each : ends) {
    runs.push_back({offset + first, offset + each});
    first = each;
  }
  return runs;
}

std::int64_t cheapest_total(const Step& step, std::int64_t least, std::int64_t most, double capacity) {
  const Samples samples{step.cost, step.size, capacity};
  CheapestCut cut;
  if (!cut.solve(samples, step.fixed)) {
    return 0;
  }
  std::int64_t bound = cut.cost();
  if (cut.batches() >= least && cut.batches() <= most) {
    return bound;
  }
  // What a micro-batch costs beyond `fixed`: more than nothing makes for fewer of them, less for more.
  const bool too_many = cut.batches() > most;
  const std::int64_t wanted = too_many ? most : least;
  std::int64_t low = too_many ? 0 : -step.fixed - 1;  // makes for more than wanted, or is not allowed
  // No price need be higher than all samples cost. The cheapest cut pays it no more often than the one into the fewest
  // micro-batches would have to, so that sums of prices do not overflow.
  const std::int64_t highest =
      std::min(step.samples() * step.cost.front() + 1, kNever / 4 / (fewest_batches(samples) + 1));
  std::int64_t high = too_many ? highest : 0;
  while (high - low > 1) {
    const std::int64_t extra = between(low, high);
    cut.solve(samples, step.fixed + extra);
    bound = std::max(bound, static_cast<std::int64_t>(Wide{cut.cost()} - Wide{extra} * wanted));
    if (cut.batches() == wanted) {
      break;
    }
    (cut.batches() > wanted ? low : high) = extra;
  }
  return bound;
}

}  // namespace chronica
