#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "check.hpp"
#include "drained_steps.hpp"
#include "steady_clock.hpp"
#include "step_timer.hpp"

namespace {

/// A clock that advances by one at each beginning and end. What ends by `complete` has completed, as on a device.
struct LateClock {
  struct Interval {
    std::int64_t start = 0;
    std::int64_t stop = 0;
  };
  struct State {
    std::int64_t now = 0;
    std::int64_t complete = 1'000'000;
    std::int64_t lost = -1;  // the end of an interval that cannot be read
    bool refuses = false;
    bool throws = false;
    int held = 0;  // intervals that were begun and not released
    int most_held = 0;
  };
  std::shared_ptr<State> state = std::make_shared<State>();

  [[nodiscard]] bool begin(Interval& interval, std::int64_t offset = 0) const {
    if (state->refuses) {
      return false;
    }
    interval.start = ++state->now + offset;
    state->most_held = std::max(state->most_held, ++state->held);
    return true;
  }
  [[nodiscard]] bool end(Interval& interval) const {
    interval.stop = ++state->now;
    return !state->refuses;
  }
  [[nodiscard]] chronica::Reading read(const Interval& interval) const {
    if (state->throws) {
      throw std::runtime_error("cannot read");
    }
    if (interval.stop == state->lost) {
      return {chronica::Reading::State::kLost};
    }
    if (interval.stop > state->complete) {
      return {chronica::Reading::State::kPending};
    }
    return {chronica::Reading::State::kComplete, interval.stop - interval.start};
  }
  static std::int64_t start_ns(const Interval& interval) noexcept { return interval.start; }
  void release(Interval& /*interval*/) const noexcept { --state->held; }
  [[nodiscard]] std::string_view failure() const noexcept { return state->refuses ? "refused" : ""; }
  static std::string_view name() noexcept { return "late"; }
};

using Timer = chronica::StepTimer<LateClock>;

void measure(Timer& timer, std::int64_t step) {
  timer.start({step, 1, 2, 3, 4});
  CHECK(timer.stop());
}

void keeps_what_was_said() {
  Timer timer(4);
  timer.start({7, 1, 2, 3, 4});
  CHECK(timer.stop());
  const auto records = timer.drain();
  CHECK(records.size() == 1);
  const chronica::Record& record = records.front();
  CHECK(record.work.step == 7 && record.work.samples == 1 && record.work.size == 2);
  CHECK(record.work.size2 == 3 && record.work.flops == 4);
  CHECK(record.start_ns == 1 && record.elapsed_ns == 1);
  CHECK(timer.drain().empty());
}

void stop_needs_start() {
  Timer timer(4);
  CHECK(!timer.stop());
  measure(timer, 0);
  CHECK(!timer.stop());
  CHECK(drained_steps(timer) == Steps{0});
}

void an_unfinished_measurement_is_given_up() {
  Timer timer(4);
  timer.start({0, 0, 0, 0, 0});
  measure(timer, 1);
  const auto records = timer.drain();
  CHECK(records.size() == 1);
  CHECK(records.front().work.step == 1);
  CHECK(records.front().start_ns == 2 && records.front().elapsed_ns == 1);  // of the second start
}

void the_oldest_is_overwritten_and_counted() {
  Timer timer(3);
  for (std::int64_t step = 0; step < 5; ++step) {
    measure(timer, step);
  }
  CHECK(timer.overwritten() == 2);
  CHECK((drained_steps(timer) == Steps{2, 3, 4}));
  // The ring goes on where it stands.
  for (std::int64_t step = 5; step < 9; ++step) {
    measure(timer, step);
  }
  CHECK(timer.overwritten() == 3);
  CHECK((drained_steps(timer) == Steps{6, 7, 8}));
}

void what_is_not_ready_stays() {
  const LateClock clock;
  Timer timer(8, clock);
  for (std::int64_t step = 0; step < 4; ++step) {
    measure(timer, step);  // stops at 2, 4, 6, 8
  }
  clock.state->complete = 5;
  CHECK((drained_steps(timer) == Steps{0, 1}));
  CHECK(drained_steps(timer).empty());
  clock.state->complete = 8;
  CHECK((drained_steps(timer) == Steps{2, 3}));
}

void what_is_not_ready_is_overwritten_too() {
  const LateClock clock;
  clock.state->complete = 0;
  Timer timer(3, clock);
  for (std::int64_t step = 0; step < 5; ++step) {
    measure(timer, step);  // stops at 2, 4, 6, 8, 10
    CHECK(timer.drain().empty());
  }
  CHECK(timer.overwritten() == 2);
  clock.state->complete = 7;  // of steps 0, 1, 2; the first two are lost
  CHECK(drained_steps(timer) == Steps{2});
  measure(timer, 5);
  CHECK(timer.overwritten() == 2);
  clock.state->complete = 100;
  CHECK((drained_steps(timer) == Steps{3, 4, 5}));
}

void what_the_clock_is_told_goes_with_start() {
  Timer timer(1);
  timer.start({}, std::int64_t{-10});
  CHECK(timer.stop());
  CHECK(timer.drain().front().elapsed_ns == 11);
}

void extend_moves_the_last_end() {
  const LateClock clock;
  Timer timer(2, clock);
  timer.extend();  // nothing was stopped
  CHECK(clock.state->now == 0);
  measure(timer, 0);  // 1 to 2
  timer.extend();     // to 3
  timer.start({1, 0, 0, 0, 0});
  timer.extend();       // to 5: the one stopped last, not the one under way
  CHECK(timer.stop());  // 4 to 6
  measure(timer, 2);    // 7 to 8, overwrites step 0
  timer.extend();       // to 9, across the end of the ring
  const auto records = timer.drain();
  CHECK(records.size() == 2 && timer.overwritten() == 1);
  CHECK(records[0].work.step == 1 && records[0].start_ns == 4 && records[0].elapsed_ns == 2);
  CHECK(records[1].work.step == 2 && records[1].start_ns == 7 && records[1].elapsed_ns == 2);
  timer.extend();  // it was drained
  CHECK(clock.state->now == 9);
  measure(timer, 3);
  timer.extend();
  CHECK(timer.drain().front().elapsed_ns == 2);
}

void extend_reaches_what_drain_left() {
  const LateClock clock;
  Timer timer(4, clock);
  measure(timer, 0);
  measure(timer, 1);  // 3 to 4
  clock.state->complete = 3;
  CHECK(drained_steps(timer) == Steps{0});
  timer.extend();  // to 5
  clock.state->complete = 100;
  CHECK(timer.drain().front().elapsed_ns == 2);
}

void what_the_clock_refuses_is_skipped() {
  const LateClock clock;
  Timer timer(2, clock);
  measure(timer, 0);
  CHECK(timer.skipped() == 0 && timer.failure().empty());
  clock.state->refuses = true;
  measure(timer, 1);  // a stop of a skipped start is no error
  CHECK(timer.skipped() == 1 && timer.failure() == "refused");
  CHECK(!timer.stop());
  clock.state->refuses = false;
  timer.extend();  // the one stopped last was skipped
  CHECK(clock.state->now == 2);
  timer.start({2, 0, 0, 0, 0});
  clock.state->refuses = true;
  CHECK(timer.stop());  // the end is refused
  CHECK(timer.skipped() == 2 && clock.state->held == 1);
  timer.extend();
  CHECK(drained_steps(timer) == Steps{0});
  CHECK(clock.state->held == 0);
}

void an_extension_that_is_refused_drops_the_measurement() {
  const LateClock clock;
  Timer timer(2, clock);
  for (std::int64_t step = 0; step < 3; ++step) {
    measure(timer, step);
  }
  clock.state->refuses = true;
  timer.extend();
  timer.extend();  // only once
  CHECK(timer.skipped() == 1 && timer.overwritten() == 1 && clock.state->held == 1);
  clock.state->refuses = false;
  measure(timer, 3);
  CHECK((drained_steps(timer) == Steps{1, 3}));
  CHECK(timer.overwritten() == 1);
}

void what_cannot_be_read_is_skipped() {
  const LateClock clock;
  Timer timer(3, clock);
  for (std::int64_t step = 0; step < 3; ++step) {
    measure(timer, step);  // stops at 2, 4, 6
  }
  clock.state->lost = 4;
  CHECK((drained_steps(timer) == Steps{0, 2}));
  CHECK(timer.skipped() == 1 && clock.state->held == 0);
}

void a_clock_that_throws_loses_nothing() {
  const LateClock clock;
  Timer timer(2, clock);
  measure(timer, 0);
  clock.state->throws = true;
  bool thrown = false;
  try {
    drained_steps(timer);
  } catch (const std::runtime_error&) {
    thrown = true;
  }
  clock.state->throws = false;
  CHECK(thrown);
  CHECK(drained_steps(timer) == Steps{0});
}

void every_interval_is_released_once() {
  const LateClock clock;
  Timer timer(3, clock);
  for (std::int64_t step = 0; step < 20; ++step) {
    timer.start({});  // given up
    measure(timer, step);
    clock.state->complete = step % 7 == 0 ? clock.state->now : 0;
    timer.drain();
  }
  CHECK(clock.state->most_held == 4);  // the ring and the one under way
  clock.state->complete = 1'000'000;
  timer.drain();
  CHECK(clock.state->held == 0);
}

void moving_takes_the_measurements_along() {
  Timer timer(2);
  measure(timer, 8);
  timer.start({9, 0, 0, 0, 0});
  Timer moved = std::move(timer);
  CHECK(moved.stop());
  CHECK(moved.capacity() == 2);
  CHECK((drained_steps(moved) == Steps{8, 9}));
}

void needs_a_capacity() {
  bool refused = false;
  try {
    const Timer timer(0);
  } catch (const std::invalid_argument&) {
    refused = true;
  }
  CHECK(refused);
}

void the_steady_clock_measures_time() {
  chronica::StepTimer<chronica::SteadyClock> timer(2);
  timer.start({});
  std::this_thread::sleep_for(std::chrono::milliseconds(2));
  CHECK(timer.stop());
  timer.start({});
  CHECK(timer.stop());
  const auto records = timer.drain();
  CHECK(records.size() == 2);
  CHECK(records[0].elapsed_ns >= 2'000'000);
  CHECK(records[1].elapsed_ns >= 0);
  CHECK(records[1].start_ns >= records[0].start_ns + records[0].elapsed_ns);
  CHECK(timer.skipped() == 0 && timer.failure().empty() && timer.clock_name() == "steady clock");
}

}  // namespace

int main() {
  keeps_what_was_said();
  stop_needs_start();
  an_unfinished_measurement_is_given_up();
  the_oldest_is_overwritten_and_counted();
  what_is_not_ready_stays();
  what_is_not_ready_is_overwritten_too();
  what_the_clock_is_told_goes_with_start();
  extend_moves_the_last_end();
  extend_reaches_what_drain_left();
  what_the_clock_refuses_is_skipped();
  an_extension_that_is_refused_drops_the_measurement();
  what_cannot_be_read_is_skipped();
  a_clock_that_throws_loses_nothing();
  every_interval_is_released_once();
  moving_takes_the_measurements_along();
  needs_a_capacity();
  the_steady_clock_measures_time();
  return failures;
}
