#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>
#include <string_view>

#include "clock.hpp"

/// A clock written in Python: an object with a `name` and the methods `begin()`, which returns an interval or None,
/// `end(interval)`, `ready(interval)` and `elapsed_ns(interval)`.
///
/// An exception in one of them is an interval that cannot be taken, and its text the failure; but what is no
/// `Exception`, like KeyboardInterrupt, goes on to the caller.
class PythonClock {
 public:
  struct Interval {
    pybind11::object handle;
    std::int64_t start_ns = 0;
  };

  /// Raises TypeError if the object lacks something.
  explicit PythonClock(const pybind11::object& clock);

  bool begin(Interval& interval);
  bool end(Interval& interval);
  [[nodiscard]] chronica::Reading read(const Interval& interval);
  static std::int64_t start_ns(const Interval& interval) noexcept { return interval.start_ns; }
  static void release(Interval& interval) { interval.handle = pybind11::object(); }
  [[nodiscard]] std::string_view failure() const noexcept { return failure_; }
  [[nodiscard]] std::string_view name() const noexcept { return name_; }

 private:
  template <class Result, class Action>
  Result attempt(Result otherwise, Action action);

  pybind11::object begin_;
  pybind11::object end_;
  pybind11::object ready_;
  pybind11::object elapsed_ns_;
  std::string name_;
  std::string failure_;
};
