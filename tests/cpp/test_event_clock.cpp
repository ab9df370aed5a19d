#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "check.hpp"
#include "drained_steps.hpp"
#include "event_clock.hpp"
#include "standin_cuda.hpp"
#include "steady_clock.hpp"
#include "step_timer.hpp"

namespace {

namespace cuda = chronica::cuda;
using chronica::EventClock;
using Timer = chronica::StepTimer<EventClock>;

constexpr int kGlobal = 0;
constexpr int kThreadLocal = 1;

Timer make_timer(std::size_t capacity) { return Timer(capacity, EventClock(capacity + 1)); }

/// A stream that other scenarios have not used.
CUstream_st* new_stream(int device = 0) { return standin_stream(device, 0); }

void measure(Timer& timer, std::int64_t step, CUstream_st* stream, std::int64_t work_ns = 0, int device = 0) {
  timer.start({step, 0, 0, 0, 0}, device, stream);
  if (work_ns > 0) {
    standin_enqueue(stream, work_ns);
  }
  CHECK(timer.stop());
}

int current_capture_mode() {
  int mode = cuda::kRelaxed;
  CHECK(cuda::driver().exchange_capture_mode(&mode) == cuda::kSuccess);
  int previous = mode;
  CHECK(cuda::driver().exchange_capture_mode(&previous) == cuda::kSuccess);
  return mode;
}

/// Run in a forked process; whether all checks held there.
bool holds_in_a_fork(const std::function<void()>& scenario) {
  const pid_t child = fork();
  if (child == 0) {
    failures = 0;
    scenario();
    _exit(failures);
  }
  int status = 0;
  return child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

/// Runs first: later this process has used the driver.
void a_child_may_use_what_its_parent_has_not() {
  CHECK(cuda::driver().problem.empty());
  Timer timer = make_timer(2);
  CHECK(holds_in_a_fork([&timer] {
    measure(timer, 3, nullptr);
    CHECK(timer.skipped() == 0);
    CHECK(drained_steps(timer) == Steps{3});
    CHECK(standin_violations() == 0);
  }));
  CHECK(standin_calls("cuInit") == 0);
}

void the_standin_refuses_misuse() {
  const cuda::Driver& driver = cuda::driver();
  cuda::Event event = nullptr;
  CHECK(driver.event_create(&event, 0) == 3 && standin_violations() == 1);  // not initialised
  CHECK(driver.init(0) == cuda::kSuccess);
  standin_set_current(nullptr);
  CHECK(driver.event_create(&event, 0) == 201 && standin_violations() == 2);  // no context
  standin_set_current(standin_primary(0));
  CHECK(driver.event_create(&event, 0) == cuda::kSuccess && standin_live_events() == 1);
  CHECK(driver.event_record(event, new_stream(1)) == 400 && standin_violations() == 3);  // of another context
  float milliseconds = 0.0F;
  CHECK(driver.event_elapsed(&milliseconds, event, event) == 400 && standin_violations() == 4);  // not recorded

  CUstream_st* stream = new_stream();
  standin_begin_capture(stream, kThreadLocal);
  std::thread([&] { CHECK(driver.event_query(event) == 201); }).join();  // no context in that thread
  CHECK(standin_end_capture(stream) == cuda::kSuccess);
  for (const int mode : {kGlobal, kThreadLocal}) {
    standin_begin_capture(stream, mode);
    CHECK(driver.event_query(event) == cuda::kCaptureUnsupported);  // by the thread that captures
    CHECK(standin_end_capture(stream) == 901);
  }
  standin_begin_capture(stream, kGlobal);
  CHECK(driver.event_record(event, stream) == cuda::kSuccess);
  CHECK(standin_end_capture(stream) == 901);
  CHECK(driver.event_query(event) == 907 && standin_violations() == 8);  // captured; no violation itself

  standin_enqueue(stream, 1'000'000);
  CHECK(driver.event_record(event, stream) == cuda::kSuccess);
  CHECK(driver.event_query(event) == cuda::kNotReady);
  CHECK(driver.event_elapsed(&milliseconds, event, event) == cuda::kNotReady);
  CHECK(driver.event_destroy(event) == cuda::kSuccess && standin_live_events() == 0);
  CHECK(driver.event_destroy(event) == 400 && driver.event_query(event) == 400 && standin_violations() == 10);
  CHECK(holds_in_a_fork([&driver] {
    int device = 0;
    CHECK(driver.device_get(&device, 0) == 3 && standin_violations() == 11);
  }));
}

void measures_the_devices_time() {
  Timer timer = make_timer(4);
  CHECK(timer.clock_name() == "CUDA events");
  CUstream_st* stream = new_stream();
  standin_enqueue(stream, 2'000'000);  // before the measurement: not part of it
  const std::int64_t before = chronica::steady_ns();
  measure(timer, 1, stream, 5'000'000);
  const std::int64_t after = chronica::steady_ns();
  standin_enqueue(stream, 9'000'000);  // behind it
  CHECK(timer.drain().empty());
  standin_advance(6'999'999);
  CHECK(timer.drain().empty());
  standin_advance(1);
  const auto records = timer.drain();
  CHECK(records.size() == 1 && records[0].elapsed_ns == 5'000'000);
  CHECK(before <= records[0].start_ns && records[0].start_ns <= after);
  CHECK(timer.skipped() == 0 && timer.failure().empty());
}

void extend_records_the_end_again() {
  Timer timer = make_timer(4);
  CUstream_st* stream = new_stream();
  measure(timer, 1, stream, 1'000'000);
  standin_advance(1'000'000);
  standin_enqueue(stream, 500'000);
  timer.extend();
  CHECK(timer.drain().empty());  // it has yet to end anew
  standin_advance(500'000);
  const auto records = timer.drain();
  CHECK(records.size() == 1 && records[0].elapsed_ns == 1'500'000);
  CHECK(standin_calls("cuEventCreate") == 2 * 5);  // for the capacity and one under way, no further ones
}

void contexts_are_pushed_only_where_needed() {
  const int retains = standin_retains(0);
  Timer timer = make_timer(4);
  CUstream_st* stream = new_stream();
  measure(timer, 0, stream);  // its own context is current
  CHECK(drained_steps(timer) == Steps{0});
  CHECK(standin_calls("cuCtxPushCurrent_v2") == 0 && standin_calls("cuCtxPopCurrent_v2") == 0);

  std::int64_t pushes = 0;
  for (CUctx_st* current : {static_cast<CUctx_st*>(nullptr), standin_primary(1), standin_context()}) {
    standin_set_current(current);
    const int depth = standin_depth();
    measure(timer, 1, stream);
    timer.extend();
    CHECK(drained_steps(timer) == Steps{1});
    pushes += 4;  // start, stop, extend, and one record drained
    CHECK(standin_calls("cuCtxPushCurrent_v2") == pushes && standin_calls("cuCtxPopCurrent_v2") == pushes);
    CHECK(standin_current() == current && standin_depth() == depth);
  }
  CHECK(standin_retains(0) == retains + 1);
}

void the_end_is_recorded_from_any_thread() {
  Timer timer = make_timer(4);
  CUstream_st* stream = new_stream();
  timer.start({7, 0, 0, 0, 0}, 0, stream);
  standin_enqueue(stream, 3'000);
  std::thread([&timer] { CHECK(timer.stop()); }).join();  // has no context
  standin_advance(3'000);
  std::thread([&timer] { CHECK(timer.drain().front().elapsed_ns == 3'000); }).join();
}

void the_null_stream_is_the_devices_own() {
  Timer timer = make_timer(4);
  standin_set_current(standin_primary(0));
  standin_enqueue(nullptr, 4'000);
  standin_set_current(standin_primary(1));
  timer.start({}, 0, nullptr);
  standin_enqueue(nullptr, 50'000);  // of device 1
  CHECK(timer.stop());
  standin_set_current(standin_primary(0));
  CHECK(timer.drain().empty());
  standin_advance(4'000);
  CHECK(timer.drain().front().elapsed_ns == 0);
}

void two_devices() {
  std::array timers{make_timer(2), make_timer(2)};
  const std::array streams{new_stream(0), new_stream(1)};
  for (const int device : {0, 1}) {
    const auto i = static_cast<std::size_t>(device);
    measure(timers[i], device, streams[i], 1'000 * (device + 1), device);
  }
  standin_advance(2'000);
  CHECK(timers[0].drain().front().elapsed_ns == 1'000 && timers[1].drain().front().elapsed_ns == 2'000);
  CHECK(standin_violations() == 0);

  measure(timers[0], 5, streams[1]);  // a stream of another device
  CHECK(timers[0].skipped() == 1 && timers[0].failure() == "cuEventRecord: CUDA_ERROR_INVALID_HANDLE (400)");
  CHECK(standin_violations() == 1);
  measure(timers[0], 6, streams[0]);
  CHECK(drained_steps(timers[0]) == Steps{6});
  standin_reset();
}

void a_device_that_is_not_there() {
  Timer timer = make_timer(2);
  measure(timer, 0, nullptr, 0, 7);
  CHECK(timer.skipped() == 1 && timer.failure() == "cuDeviceGet: CUDA_ERROR_INVALID_DEVICE (101)");
  CHECK(timer.drain().empty());
}

void nothing_is_recorded_into_a_capture() {
  Timer timer = make_timer(4);
  CUstream_st* stream = new_stream();
  CUstream_st* other = new_stream();
  measure(timer, 0, other);

  standin_begin_capture(stream, kGlobal);
  measure(timer, 1, stream);
  CHECK(timer.skipped() == 1);
  measure(timer, 2, other);  // is not captured
  CHECK((drained_steps(timer) == Steps{0, 2}));
  CHECK(standin_end_capture(stream) == cuda::kSuccess);

  timer.start({3, 0, 0, 0, 0}, 0, stream);
  standin_begin_capture(stream, kGlobal);
  CHECK(timer.stop());  // begun before, it cannot end within
  CHECK(timer.skipped() == 2);
  CHECK(standin_end_capture(stream) == cuda::kSuccess);

  measure(timer, 4, stream);
  standin_begin_capture(stream, kGlobal);
  timer.extend();
  CHECK(timer.skipped() == 3);
  CHECK(timer.drain().empty());
  CHECK(standin_end_capture(stream) == cuda::kSuccess);

  CUstream_st* blocking = standin_stream(0, 1);  // its capture forbids the null stream
  standin_begin_capture(blocking, kGlobal);
  measure(timer, 5, nullptr);
  CHECK(timer.skipped() == 4);
  CHECK(standin_end_capture(blocking) == cuda::kSuccess);

  CHECK(timer.failure().empty());
  measure(timer, 6, stream);
  CHECK(drained_steps(timer) == Steps{6});
}

void other_threads_captures_are_left_alone() {
  Timer timer = make_timer(200);
  CUstream_st* stream = new_stream();
  measure(timer, 0, stream);
  for (const int mode : {kGlobal, kThreadLocal}) {
    CUstream_st* captured = new_stream();
    standin_begin_capture(captured, mode);
    std::thread([&timer, stream] {
      CHECK(drained_steps(timer) == Steps{0});
      for (std::int64_t step = 0; step < 40; ++step) {
        measure(timer, step, stream);  // creates further events
      }
      Timer another = make_timer(2);  // retains, creates and destroys
      measure(another, 0, stream);
      CHECK(current_capture_mode() == kGlobal);
    }).join();
    CHECK(timer.drain().size() == 40);  // the thread that captures may harvest too
    CHECK(current_capture_mode() == kGlobal);
    CHECK(standin_end_capture(captured) == cuda::kSuccess);
    measure(timer, 0, stream);
  }
  CHECK(timer.skipped() == 0);
}

void what_a_capture_keeps_back_comes_later() {
  Timer timer = make_timer(4);
  measure(timer, 1, new_stream());
  for (const char* function : {"cuEventQuery", cuda::driver().event_elapsed.name}) {
    for (const cuda::Result result : {cuda::kNotReady, cuda::kCaptureUnsupported, 907}) {
      standin_fail(function, 1, 1, result);
      CHECK(timer.drain().empty());
    }
  }
  CHECK(timer.skipped() == 0 && timer.failure().empty());
  CHECK(drained_steps(timer) == Steps{1});
}

void a_forked_child_touches_nothing() {
  Timer timer = make_timer(4);
  measure(timer, 0, nullptr);
  timer.start({1, 0, 0, 0, 0}, 0, nullptr);
  CHECK(holds_in_a_fork([&timer] {
    standin_reset();
    CHECK(timer.stop());
    timer.extend();
    CHECK(timer.skipped() == 1);
    measure(timer, 2, nullptr);
    CHECK(timer.skipped() == 2);
    CHECK(timer.drain().empty());
    CHECK(timer.skipped() == 3);
    CHECK(timer.failure().find("forked") != std::string_view::npos);
    {
      const Timer inherited = std::move(timer);
      Timer fresh = make_timer(1);
      measure(fresh, 3, nullptr);
      CHECK(fresh.skipped() == 1);
    }
    for (const char* function : {"cuInit", "cuCtxGetCurrent", "cuEventRecord", "cuEventQuery", "cuEventDestroy_v2"}) {
      CHECK(standin_calls(function) == 0);
    }
    CHECK(standin_violations() == 0);
  }));
  CHECK(timer.stop());
  CHECK((drained_steps(timer) == Steps{0, 1}));
}

/// Each function of the driver fails once, at each of its calls: what is lost is counted, the rest goes on.
void errors_at_every_call() {
  const auto run = [](const std::string& function, std::int64_t nth) {
    const std::int64_t live = standin_live_events();
    standin_set_current(nullptr);
    standin_reset();
    bool is_reached = false;
    {
      Timer timer = make_timer(40);
      standin_fail(function.c_str(), nth, 1, 201);
      std::size_t drained = 0;
      for (std::int64_t step = 0; step < 20; ++step) {
        measure(timer, step, nullptr);
        if (step == 10 || step == 18) {
          timer.extend();
          drained += timer.drain().size();
        }
      }
      drained += timer.drain().size();
      is_reached = standin_calls(function.c_str()) >= nth;
      CHECK(drained + static_cast<std::size_t>(timer.skipped()) == 20);
      CHECK(timer.skipped() <= 1);
      CHECK(timer.overwritten() == 0);
      CHECK(timer.failure() == (is_reached ? function + ": CUDA_ERROR_INVALID_CONTEXT (201)" : ""));
      standin_reset();  // the end is for another scenario
    }
    if (is_reached) {
      CHECK(standin_live_events() == live);
      CHECK(function == "cuCtxPopCurrent_v2" || standin_depth() == 0);
      // A thread whose mode cannot be set back stays relaxed: that harms nobody.
      int mode = kGlobal;
      CHECK(cuda::driver().exchange_capture_mode(&mode) == cuda::kSuccess);
      CHECK(function == "cuThreadExchangeStreamCaptureMode" || mode == kGlobal);
    }
    return is_reached;
  };
  for (const std::string function :
       {"cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuThreadExchangeStreamCaptureMode", "cuCtxGetCurrent",
        "cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2", "cuEventCreate", "cuStreamIsCapturing", "cuEventRecord",
        "cuEventQuery", cuda::driver().event_elapsed.name}) {
    std::int64_t nth = 1;
    while (run(function, nth)) {
      ++nth;
    }
    CHECK(nth > 1);
    CHECK(standin_violations() == 0);
  }
}

void a_driver_that_is_broken_for_good() {
  for (const char* function : {"cuInit", "cuEventCreate", "cuCtxGetCurrent", "cuEventRecord"}) {
    standin_reset();
    Timer timer = make_timer(4);
    standin_fail(function, 1, 1'000'000, 999);
    for (std::int64_t step = 0; step < 5; ++step) {
      measure(timer, step, nullptr);
      timer.extend();
    }
    CHECK(timer.skipped() == 5 && timer.drain().empty());
    CHECK(timer.failure() == std::string(function) + ": unknown error (999)");
  }
}

/// Runs last: events are left behind.
void a_driver_that_fails_at_the_end() {
  const std::array<std::pair<const char*, std::int64_t>, 5> left_behind{{{"cuCtxPopCurrent_v2", 0},
                                                                         {"cuEventDestroy_v2", 2},
                                                                         {"cuCtxGetCurrent", 6},
                                                                         {"cuCtxPushCurrent_v2", 6},
                                                                         {"cuThreadExchangeStreamCaptureMode", 6}}};
  for (const auto& [function, events] : left_behind) {
    const std::int64_t before = standin_live_events();
    standin_set_current(nullptr);
    {
      Timer timer = make_timer(2);
      measure(timer, 0, nullptr);
      standin_fail(function, 1, 2, 201);
    }
    CHECK(standin_live_events() == before + events);
    CHECK(standin_violations() == 0);
    standin_reset();
  }
}

void a_missing_driver_is_named() {
  const cuda::Driver missing = cuda::load("libnot_there.so.1");
  CHECK(missing.problem.find("libnot_there.so.1: cannot open") != std::string::npos);
  const cuda::Driver other = cuda::load("libc.so.6");
  CHECK(other.problem == "the CUDA driver libc.so.6, of an unknown version, has no cuDriverGetVersion");
  const cuda::Driver cut = cuda::load(STANDIN_CUT);
  CHECK(cut.problem == "the CUDA driver " STANDIN_CUT ", for CUDA 13.0, has no cuEventQuery");
  for (const cuda::Driver* driver : {&missing, &other, &cut}) {
    Timer timer(2, EventClock(3, *driver));
    measure(timer, 0, nullptr);
    CHECK(timer.skipped() == 1 && timer.failure() == driver->problem);
    CHECK(timer.drain().empty());
  }
}

void the_pool_grows_to_its_bound_and_is_reused() {
  const std::int64_t before = standin_live_events();
  {
    Timer timer = make_timer(100);
    CUstream_st* stream = new_stream();
    CHECK(standin_live_events() == before);  // nothing before it is used
    for (std::int64_t step = 0; step < 1000; ++step) {
      measure(timer, step, stream);
      CHECK(timer.drain().size() == 1);
    }
    CHECK(standin_live_events() == before + 2 * 16);  // one block
    for (std::int64_t step = 0; step < 1000; ++step) {
      timer.start({}, 0, stream);  // given up
      measure(timer, step, stream);
    }
    CHECK(timer.overwritten() == 900);
    CHECK(standin_live_events() == before + 2 * 101);
    CHECK(timer.drain().size() == 100 && timer.drain().empty());
    CHECK(standin_live_events() == before + 2 * 101);
    Timer moved = std::move(timer);
    measure(moved, 5, stream);
    CHECK(drained_steps(moved) == Steps{5});
  }
  CHECK(standin_live_events() == before);
}

/// A clock of the host that reads the device's time.
struct VirtualClock : chronica::SteadyClock {
  static bool begin(Interval& interval) {
    interval.start_ns = standin_advance(0);
    return true;
  }
  static bool end(Interval& interval) {
    interval.stop_ns = standin_advance(0);
    return true;
  }
};

void a_million_records_agree_with_a_host_clock() {
  constexpr std::int64_t kRecords = 1'000'000;
  constexpr std::int64_t kBetweenDrains = 1000;
  Timer timer = make_timer(kBetweenDrains);
  chronica::StepTimer<VirtualClock> host(kBetweenDrains);
  CUstream_st* stream = new_stream();
  std::int64_t live = 0;
  std::int64_t compared = 0;
  std::int64_t wrong = 0;
  std::uint64_t draw = 1;
  for (std::int64_t step = 0; step < kRecords; ++step) {
    timer.start({step, 0, 0, 0, 0}, 0, stream);
    host.start({step, 0, 0, 0, 0});
    draw = draw * 6364136223846793005U + 1442695040888963407U;
    standin_advance(static_cast<std::int64_t>(draw >> (28 + step % 32)));  // up to a minute, of all magnitudes
    CHECK(timer.stop() && host.stop());
    if ((step + 1) % kBetweenDrains == 0) {
      const auto records = timer.drain();
      const auto expected = host.drain();
      CHECK(records.size() == expected.size());
      for (std::size_t i = 0; i < std::min(records.size(), expected.size()); ++i) {
        const auto difference = static_cast<double>(std::abs(records[i].elapsed_ns - expected[i].elapsed_ns));
        const double allowed = std::max(1.0, 1e-6 * static_cast<double>(expected[i].elapsed_ns));
        wrong += records[i].work.step != expected[i].work.step || difference > allowed;
        ++compared;
      }
      CHECK(live == 0 || standin_live_events() == live);
      live = standin_live_events();
    }
  }
  CHECK(compared == kRecords && wrong == 0);
  CHECK(timer.skipped() == 0 && timer.overwritten() == 0);
}

}  // namespace

/// `argv[1]`: the name under which the driver at hand has the elapsed time.
int main(int argc, char** argv) {
  CHECK(argc == 2 && cuda::driver().event_elapsed.name == std::string_view(argv[1]));
  a_child_may_use_what_its_parent_has_not();
  the_standin_refuses_misuse();
  for (const auto scenario :
       {&measures_the_devices_time, &extend_records_the_end_again, &contexts_are_pushed_only_where_needed,
        &the_end_is_recorded_from_any_thread, &the_null_stream_is_the_devices_own, &two_devices,
        &a_device_that_is_not_there, &nothing_is_recorded_into_a_capture, &other_threads_captures_are_left_alone,
        &what_a_capture_keeps_back_comes_later, &a_forked_child_touches_nothing, &errors_at_every_call,
        &a_driver_that_is_broken_for_good, &a_missing_driver_is_named, &the_pool_grows_to_its_bound_and_is_reused,
        &a_million_records_agree_with_a_host_clock}) {
    standin_set_current(standin_primary(0));
    standin_reset();
    scenario();
    CHECK(standin_violations() == 0);
    CHECK(standin_live_events() == 0);
  }
  a_driver_that_fails_at_the_end();
  return failures;
}
