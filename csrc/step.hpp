#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace chronica {

/// 128-bit products of two 64-bit integers: ratios are compared by cross multiplication, never by division.
__extension__ using Wide = __int128;

/// Relative speeds of the ranks as integers whose sum stays below 2^52, so that sums are exact in a double too.
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

  /// The time a rank of integer speed `speed` takes for `load`, in the unit of cost ÷ speed that the caller gave.
  /// One correctly rounded division of exact doubles: it never reverses an order of the exact ratios.
  [[nodiscard]] double time(std::int64_t load, std::int64_t speed, int load_exponent) const noexcept;

 private:
  std::vector<std::int64_t> speed_;
  std::vector<std::int64_t> fastest_first_;
  bool uniform_ = true;
  int exponent_ = 0;  // integer speed = given speed · 2^exponent_
};

/// One step's samples as the solvers see them: integer costs, largest first.
struct Step {
  /// Quantise the costs of a step so that no load can exceed 2^52. Ties keep their drawn order.
  Step(std::span<const double> costs, double fixed_cost, std::int64_t rank_count);

  [[nodiscard]] std::int64_t samples() const noexcept { return static_cast<std::int64_t>(cost.size()); }

  std::vector<std::int64_t> cost;      // (samples), descending
  std::vector<std::int64_t> position;  // (samples), where each stood in the drawn order of the step
  std::int64_t fixed = 0;              // what every rank pays for its micro-batch
  int exponent = 0;                    // integer cost = given cost · 2^exponent
};

/// How many samples a rank takes: everybody from `least` to `most`, all of them together exactly the step's.
struct CountRange {
  std::int64_t least = 1;
  std::int64_t most = 1;
};

/// Which samples (indices into Step::cost) each rank takes.
using Shares = std::vector<std::vector<std::int64_t>>;

}  // namespace chronica
