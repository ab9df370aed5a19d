#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace chronica {

/// 128-bit products of two 64-bit integers: ratios are compared by cross multiplication, never by division.
__extension__ using Wide = __int128;

/// A load and the integer speed it is divided by: an exact rational time.
struct Time {
  std::int64_t load = 0;
  std::int64_t speed = 1;

  friend bool operator<(const Time& a, const Time& b) noexcept {
    return Wide{a.load} * b.speed < Wide{b.load} * a.speed;
  }
};

/// The exponent e for which `count` values of at most `largest` · 2^e add up to at most 2^52, so that their sums are
/// exact in a double too.
int exponent_for(double largest, std::int64_t count);

/// Makes integers of values that are not negative: value · 2^exponent, rounded.
class Scale {
 public:
  explicit Scale(int exponent);
  [[nodiscard]] std::int64_t operator()(double value) const noexcept {
    return static_cast<std::int64_t>(value * half_ * other_ + 0.5);
  }

 private:
  double half_;  // two factors, since the exponents of the smallest costs are beyond a double's
  double other_;
};

/// Relative speeds of the ranks as integers whose sum stays below 2^52.
class Speeds {
 public:
  explicit Speeds(std::span<const double> speeds);

  [[nodiscard]] std::int64_t ranks() const noexcept { return static_cast<std::int64_t>(speed_.size()); }
  [[nodiscard]] std::int64_t operator[](std::int64_t rank) const noexcept {
    return speed_[static_cast<std::size_t>(rank)];
  }
  [[nodiscard]] bool uniform() const noexcept { return uniform_; }
  /// The ranks, fastest first; equal ones by number.
  [[nodiscard]] const std::vector<std::int64_t>& fastest_first() const noexcept { return fastest_first_; }
  [[nodiscard]] std::int64_t fastest() const noexcept { return (*this)[fastest_first_.front()]; }
  [[nodiscard]] std::int64_t slowest() const noexcept { return (*this)[fastest_first_.back()]; }
  [[nodiscard]] std::int64_t sum() const noexcept { return sum_; }

  /// The time a rank of integer speed `speed` takes for `load`, in the unit of cost ÷ speed that the caller gave.
  /// One correctly rounded division of exact doubles: it never reverses an order of the exact ratios.
  [[nodiscard]] double time(std::int64_t load, std::int64_t speed, int load_exponent) const noexcept;
  /// The other way: about what such a rank computes in a time.
  [[nodiscard]] double load(double time, std::int64_t speed, int load_exponent) const noexcept;

 private:
  std::vector<std::int64_t> speed_;
  std::vector<std::int64_t> fastest_first_;
  std::int64_t sum_ = 0;
  bool uniform_ = true;
  int exponent_ = 0;  // integer speed = given speed · 2^exponent_
};

/// One step's samples as the solvers see them: integer costs, largest first.
struct Step {
  /// Quantise the costs of a step so that no load can exceed 2^52, every sample alone in its micro-batch. Samples are
  /// sorted by size if they are padded (a larger one then never costs less), else by cost and size; ties keep their
  /// drawn order.
  Step(std::span<const double> costs, std::span<const double> sizes, double fixed_cost, std::int64_t rank_count,
       bool padded);

  [[nodiscard]] std::int64_t samples() const noexcept { return static_cast<std::int64_t>(cost.size()); }

  std::vector<std::int64_t> cost;      // (samples), descending
  std::vector<double> size;            // (samples), what counts towards the capacity of a micro-batch
  std::vector<std::int64_t> position;  // (samples), where each stood in the drawn order of the step
  std::int64_t fixed = 0;              // what every micro-batch costs besides
  int exponent = 0;                    // integer cost = given cost · 2^exponent
  bool padded = true;                  // a micro-batch costs fixed + n · its largest; else fixed + Σ
};

/// Consecutive samples of a sorted step.
struct Run {
  std::int64_t first = 0;
  std::int64_t end = 0;
};

/// How many samples a rank takes: everybody from `least` to `most`, all of them together exactly the step's.
struct CountRange {
  std::int64_t least = 1;
  std::int64_t most = 1;
};

/// What the ranks may take: how many samples, in how many micro-batches, and how large each of these may be.
struct Limits {
  CountRange counts;
  std::int64_t micro_batches = 1;
  std::span<const double> capacity;  // (ranks), largest n · max size (padded) or Σ size of a micro-batch
};

/// A rank's samples (indices into Step::cost), ascending: from its largest to its smallest. And those of all ranks.
using Share = std::vector<std::int64_t>;
using Shares = std::vector<Share>;

}  // namespace chronica
