#include <chrono>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "check.hpp"
#include "steady_clock.hpp"
#include "step_timer.hpp"

namespace {

/// A clock that advances by one at each mark; marks up to `complete` have completed, as events on a device would.
struct LateClock {
  using Mark = std::int64_t;
  struct State {
    std::int64_t now = 0;
    std::int64_t complete = 1'000'000;
  };
  std::shared_ptr<State> state = std::make_shared<State>();

  [[nodiscard]] Mark mark() const noexcept { return ++state->now; }
  [[nodiscard]] bool ready(Mark stop) const noexcept { return stop <= state->complete; }
  static std::int64_t start_ns(Mark start) noexcept { return start; }
  static std::int64_t elapsed_ns(Mark start, Mark stop) noexcept { return stop - start; }
};

using Timer = chronica::StepTimer<LateClock>;

void measure(Timer& timer, std::int64_t step) {
  timer.start({step, 1, 2, 3, 4});
  CHECK(timer.stop());
}

std::vector<std::int64_t> drained_steps(Timer& timer) {
  std::vector<std::int64_t> steps;
  for (const chronica::Record& record : timer.drain()) {
    steps.push_back(record.work.step);
  }
  return steps;
}

using Steps = std::vector<std::int64_t>;

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
}

}  // namespace

int main() {
  keeps_what_was_said();
  stop_needs_start();
  an_unfinished_measurement_is_given_up();
  the_oldest_is_overwritten_and_counted();
  what_is_not_ready_stays();
  what_is_not_ready_is_overwritten_too();
  moving_takes_the_measurements_along();
  needs_a_capacity();
  the_steady_clock_measures_time();
  return failures;
}
