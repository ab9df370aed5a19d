#pragma once

#include <concepts>
#include <cstdint>
#include <string_view>

namespace chronica {

/// What a clock knows of an interval that has ended.
struct Reading {
  enum class State {
    kPending,   // not over yet on the device: ask again later
    kComplete,  // `elapsed_ns` is its length
    kLost,      // never to be had
  };
  State state = State::kPending;
  std::int64_t elapsed_ns = 0;
};

/// What `StepTimer` measures with. Besides these, a clock has `bool begin(Interval&, ...)`, which takes whatever
/// `StepTimer::start` is given after the work.
///
/// `begin` and `end` are false where the interval cannot be taken; after a `begin` that was false there is nothing to
/// release. `end` may be called again: the interval ends then instead. `start_ns` is the host's steady clock at
/// `begin`. `release` gives back what an interval holds, ended or not. `failure` says what went wrong last, empty if
/// nothing did.
template <class Candidate>
concept Clock = requires(Candidate clock, const Candidate known, typename Candidate::Interval interval,
                         const typename Candidate::Interval ended) {
  { clock.end(interval) } -> std::same_as<bool>;
  { clock.read(ended) } -> std::same_as<Reading>;
  { clock.start_ns(ended) } -> std::same_as<std::int64_t>;
  { clock.release(interval) } -> std::same_as<void>;
  { known.failure() } -> std::convertible_to<std::string_view>;
  { known.name() } -> std::convertible_to<std::string_view>;
};

}  // namespace chronica
