#include "event_clock.hpp"

#include <algorithm>
#include <cmath>

#include "steady_clock.hpp"

namespace chronica {

namespace {

constexpr std::size_t kFirstPairs = 16;
constexpr double kNanosecondsPerMillisecond = 1e6;

}  // namespace

/// The clock's context is current in this thread until the end of the scope, then what was current before. Autograd's
/// threads have none or another device's.
class EventClock::ContextScope {
 public:
  explicit ContextScope(EventClock& clock) : clock_(clock) {
    cuda::Context current = nullptr;
    is_current_ = clock.succeeds(clock.driver_->context_current, &current);
    if (is_current_ && current != clock.context_) {
      is_pushed_ = is_current_ = clock.succeeds(clock.driver_->context_push, clock.context_);
    }
  }
  ContextScope(const ContextScope&) = delete;
  ContextScope& operator=(const ContextScope&) = delete;
  ~ContextScope() {
    cuda::Context popped = nullptr;
    if (is_pushed_) {
      clock_.succeeds(clock_.driver_->context_pop, &popped);
    }
  }

  explicit operator bool() const noexcept { return is_current_; }

 private:
  EventClock& clock_;
  bool is_current_ = false;
  bool is_pushed_ = false;
};

/// Until the end of the scope no call of this thread invalidates a capture that another thread makes.
class EventClock::RelaxedScope {
 public:
  explicit RelaxedScope(EventClock& clock) : clock_(clock), is_relaxed_(exchange()) {}
  RelaxedScope(const RelaxedScope&) = delete;
  RelaxedScope& operator=(const RelaxedScope&) = delete;
  ~RelaxedScope() {
    if (is_relaxed_) {
      exchange();
    }
  }

  explicit operator bool() const noexcept { return is_relaxed_; }

 private:
  bool exchange() { return clock_.succeeds(clock_.driver_->exchange_capture_mode, &mode_); }

  EventClock& clock_;
  int mode_ = cuda::kRelaxed;  // then what the thread's mode was
  bool is_relaxed_;
};

EventClock::~EventClock() {
  if (pairs_.empty() || !may_call()) {
    return;
  }
  const ContextScope context(*this);
  const RelaxedScope relaxed(*this);
  if (context && relaxed) {
    for (const Pair& pair : pairs_) {
      succeeds(driver_->event_destroy, pair.start);
      succeeds(driver_->event_destroy, pair.stop);
    }
  }
}

bool EventClock::begin(Interval& interval, int device, cuda::Stream stream) {
  interval.start_ns = steady_ns();
  if (!may_call() || (context_ == nullptr && !retain_context(device))) {
    return false;
  }
  const ContextScope context(*this);
  if (!context || (free_.empty() && !grow()) || !record(free_.back().start, stream)) {
    return false;
  }
  interval.events = free_.back();
  interval.stream = stream;
  free_.pop_back();
  return true;
}

bool EventClock::end(Interval& interval) {
  if (!may_call()) {
    return false;
  }
  const ContextScope context(*this);
  return context && record(interval.events.stop, interval.stream);
}

Reading EventClock::read(const Interval& interval) {
  if (!may_call()) {
    return {Reading::State::kLost};
  }
  const ContextScope context(*this);
  const RelaxedScope relaxed(*this);
  if (!context || !relaxed) {
    return {Reading::State::kLost};
  }
  const auto is_pending = [](cuda::Result result) { return result == cuda::kNotReady || cuda::is_capture(result); };
  const cuda::Result ended = driver_->event_query(interval.events.stop);
  if (is_pending(ended)) {
    return {Reading::State::kPending};
  }
  if (!succeeded(driver_->event_query.name, ended)) {
    return {Reading::State::kLost};
  }
  float milliseconds = 0.0F;
  const cuda::Result elapsed = driver_->event_elapsed(&milliseconds, interval.events.start, interval.events.stop);
  if (is_pending(elapsed)) {
    return {Reading::State::kPending};
  }
  if (!succeeded(driver_->event_elapsed.name, elapsed)) {
    return {Reading::State::kLost};
  }
  return {Reading::State::kComplete, std::llround(double{milliseconds} * kNanosecondsPerMillisecond)};
}

bool EventClock::may_call() {
  if (!driver_->problem.empty()) {
    failure_ = driver_->problem;
    return false;
  }
  if (cuda::is_lost_by_fork()) {
    failure_ = "this process was forked from one that used CUDA, so it cannot; start it by spawn instead of fork";
    return false;
  }
  return true;
}

bool EventClock::retain_context(int device) {
  cuda::begin_use();
  if (!succeeds(driver_->init, 0U)) {
    return false;
  }
  const RelaxedScope relaxed(*this);
  cuda::Device handle = 0;
  return relaxed && succeeds(driver_->device_get, &handle, device) &&
         succeeds(driver_->primary_context_retain, &context_, handle);
}

/// Create more pairs of events, as many as there are; false if there is not one more.
bool EventClock::grow() {
  const RelaxedScope relaxed(*this);
  const std::size_t end = std::min(pairs_.size() + std::max(pairs_.size(), kFirstPairs), most_intervals_);
  pairs_.reserve(end);
  free_.reserve(end);
  while (relaxed && pairs_.size() < end) {
    Pair pair;
    if (!succeeds(driver_->event_create, &pair.start, 0U)) {
      break;
    }
    if (!succeeds(driver_->event_create, &pair.stop, 0U)) {
      succeeds(driver_->event_destroy, pair.start);
      break;
    }
    pairs_.push_back(pair);
    free_.push_back(pair);
  }
  return !free_.empty();
}

/// Record an event, unless the stream is being captured: then it would become a part of the graph.
bool EventClock::record(cuda::Event event, cuda::Stream stream) {
  int status = cuda::kNotCapturing;
  return succeeds(driver_->stream_is_capturing, stream, &status) && status == cuda::kNotCapturing &&
         succeeds(driver_->event_record, event, stream);
}

template <class... Parameters, class... Arguments>
bool EventClock::succeeds(const cuda::Function<Parameters...>& function, Arguments... arguments) {
  return succeeded(function.name, function(arguments...));
}

bool EventClock::succeeded(const char* function, cuda::Result result) {
  if (result != cuda::kSuccess && !cuda::is_capture(result)) {
    failure_ = cuda::describe(*driver_, function, result);
  }
  return result == cuda::kSuccess;
}

}  // namespace chronica
