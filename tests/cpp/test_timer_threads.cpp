// What threads do to timers; for ThreadSanitizer above all.

#include <cstdint>
#include <latch>
#include <mutex>
#include <thread>
#include <vector>

#include "check.hpp"
#include "event_clock.hpp"
#include "standin_cuda.hpp"
#include "steady_clock.hpp"
#include "step_timer.hpp"

namespace {

using chronica::EventClock;

constexpr int kThreads = 4;
constexpr std::int64_t kMeasurements = 2000;

/// Each thread has its own timers; all make the first use of the driver at once.
void timers_of_their_own() {
  std::latch begin(kThreads);
  std::mutex checking;
  std::vector<std::thread> threads;
  for (int thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([&begin, &checking, thread] {
      CUstream_st* stream = standin_stream(thread % 2, 0);
      begin.arrive_and_wait();
      chronica::StepTimer<EventClock> timer(64, EventClock(65));
      chronica::StepTimer<chronica::SteadyClock> host(64);
      std::int64_t stopped = 0;
      std::size_t drained = 0;
      for (std::int64_t step = 0; step < kMeasurements; ++step) {
        timer.start({step, 0, 0, 0, 0}, thread % 2, stream);
        host.start({step, 0, 0, 0, 0});
        standin_advance(10);
        stopped += timer.stop() && host.stop();
        timer.extend();
        drained += timer.drain().size() + host.drain().size();
      }
      const std::lock_guard lock(checking);
      CHECK(stopped == kMeasurements && drained == 2 * kMeasurements);
      CHECK(timer.skipped() == 0 && timer.failure().empty());
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  CHECK(standin_violations() == 0 && standin_live_events() == 0);
  CHECK(standin_retains(0) == kThreads / 2 && standin_retains(1) == kThreads / 2);
}

/// One timer, and a lock around each call, as Python's is: one thread measures, the others drain.
void a_shared_timer() {
  std::mutex gil;
  chronica::StepTimer<EventClock> timer(16, EventClock(17));
  CUstream_st* stream = standin_stream(0, 0);
  std::int64_t drained = 0;
  bool is_over = false;
  std::vector<std::thread> threads;
  threads.emplace_back([&] {
    for (std::int64_t step = 0; step < kMeasurements; ++step) {
      {
        const std::lock_guard lock(gil);
        timer.start({step, 0, 0, 0, 0}, 0, stream);
      }
      standin_advance(10);
      const std::lock_guard lock(gil);
      CHECK(timer.stop());
    }
    const std::lock_guard lock(gil);
    is_over = true;
  });
  for (int thread = 1; thread < kThreads; ++thread) {
    threads.emplace_back([&] {
      for (bool is_last = false; !is_last;) {
        const std::lock_guard lock(gil);
        is_last = is_over;
        drained += static_cast<std::int64_t>(timer.drain().size());
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  CHECK(drained + timer.overwritten() == kMeasurements && timer.skipped() == 0);
  CHECK(standin_violations() == 0);
}

}  // namespace

int main() {
  timers_of_their_own();
  a_shared_timer();
  return failures;
}
