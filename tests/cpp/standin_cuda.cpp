// A stand-in for libcuda.so.1 without a device: time is what the test says it is, and what a real driver would punish
// is refused and counted. Built as a shared library; the functions of the driver have its own names.

#include "standin_cuda.hpp"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

using chronica::cuda::kCaptureUnsupported;
using chronica::cuda::kNotReady;
using chronica::cuda::kRelaxed;
using chronica::cuda::kSuccess;
using chronica::cuda::Result;

struct CUstream_st {
  CUctx_st* context = nullptr;
  bool is_blocking = false;
  std::int64_t busy_until = 0;
};

struct CUctx_st {
  int retains = 0;
  CUstream_st default_stream;
};

struct CUevent_st {
  CUctx_st* context = nullptr;
  bool is_alive = true;
  bool is_recorded = false;
  bool is_captured = false;
  std::int64_t time = 0;  // when the device gets there
};

namespace {

constexpr Result kInvalidValue = 1;
constexpr Result kNotInitialized = 3;
constexpr Result kInvalidDevice = 101;
constexpr Result kInvalidContext = 201;
constexpr Result kInvalidHandle = 400;
constexpr Result kCaptureInvalidated = 901;
constexpr Result kCaptureImplicit = 906;
constexpr Result kCapturedEvent = 907;
constexpr int kGlobal = 0;

struct Capture {
  CUstream_st* stream;
  int mode;
  std::thread::id thread;
  bool is_valid = true;
};

struct FunctionState {
  std::int64_t calls = 0;
  std::int64_t fail_from = 0;  // counted in calls
  std::int64_t fail_until = 0;
  Result failure = kSuccess;
};

struct State {
  State() {
    for (CUctx_st& context : primary) {
      context.default_stream.context = &context;
    }
  }

  std::mutex mutex;
  pid_t initialized_by = 0;
  std::int64_t now = 0;
  std::int64_t violations = 0;
  std::string violation;
  std::map<std::string, FunctionState, std::less<>> functions;
  std::array<CUctx_st, 2> primary;
  std::deque<CUctx_st> contexts;  // handles stay valid as pointers for ever, so that misuse can be told
  std::deque<CUstream_st> streams;
  std::deque<CUevent_st> events;
  std::int64_t live_events = 0;
  std::vector<Capture> captures;
};

State& state() {
  static State* const shared = new State;  // outlives every other static object
  return *shared;
}

thread_local std::vector<CUctx_st*> stack;
thread_local int capture_mode = kGlobal;

Result violate(const std::string& what, Result result) {
  ++state().violations;
  state().violation = what;
  return result;
}

FunctionState& function_named(const char* name) {
  auto& functions = state().functions;
  const auto found = functions.find(std::string_view(name));
  return found == functions.end() ? functions[name] : found->second;
}

enum class Needs { kNothing, kInit, kContext };

/// The body of a function of the driver, unless it has been told to fail or something it needs is missing.
template <class Body>
Result call(const char* name, Needs needs, Body body) {
  State& all = state();
  const std::lock_guard lock(all.mutex);
  static FunctionState& function = function_named(name);  // each body is of one function
  const std::int64_t number = ++function.calls;
  if (function.fail_from <= number && number < function.fail_until) {
    return function.failure;
  }
  if (all.initialized_by != 0 && all.initialized_by != getpid()) {
    return violate(std::string(name) + " in a forked process", kNotInitialized);
  }
  if (needs != Needs::kNothing && all.initialized_by == 0) {
    return violate(std::string(name) + " before cuInit", kNotInitialized);
  }
  if (needs == Needs::kContext && stack.empty()) {
    return violate(std::string(name) + " without a context", kInvalidContext);
  }
  return body();
}

/// What a call does to captures that may not see it; an error if there is one.
Result disturb_captures(const char* name) {
  if (capture_mode == kRelaxed) {
    return kSuccess;
  }
  Result result = kSuccess;
  for (Capture& capture : state().captures) {
    const bool is_own = capture.thread == std::this_thread::get_id() && capture.mode != kRelaxed;
    if (is_own || (capture_mode == kGlobal && capture.mode == kGlobal)) {
      capture.is_valid = false;
      result = violate(std::string(name) + " during a capture", kCaptureUnsupported);
    }
  }
  return result;
}

Result check(const char* name, const CUevent_st* event) {
  if (event == nullptr || !event->is_alive) {
    return violate(std::string(name) + " of an event that does not exist", kInvalidHandle);
  }
  return kSuccess;
}

CUstream_st* stream_or_default(CUstream_st* stream) {
  return stream == nullptr ? &stack.back()->default_stream : stream;
}

/// The capture that a stream is part of, or that keeps the default stream from being used; null if there is none.
Capture* capture_of(const CUstream_st* stream) {
  for (Capture& capture : state().captures) {
    const bool is_in_its_way = stream == &stream->context->default_stream && capture.stream->is_blocking &&
                               capture.stream->context == stream->context;
    if (capture.stream == stream || is_in_its_way) {
      return &capture;
    }
  }
  return nullptr;
}

Result elapsed(const char* name, float* milliseconds, const CUevent_st* start, const CUevent_st* stop) {
  for (const CUevent_st* event : {start, stop}) {
    if (const Result result = check(name, event); result != kSuccess) {
      return result;
    }
  }
  if (const Result result = disturb_captures(name); result != kSuccess) {
    return result;
  }
  if (start->is_captured || stop->is_captured) {
    return kCapturedEvent;
  }
  if (!start->is_recorded || !stop->is_recorded || start->context != stop->context) {
    return violate(std::string(name) + " of events that were not recorded in one context", kInvalidHandle);
  }
  if (std::max(start->time, stop->time) > state().now) {
    return kNotReady;
  }
  *milliseconds = static_cast<float>(static_cast<double>(stop->time - start->time) / 1e6);
  return kSuccess;
}

}  // namespace

extern "C" {

Result cuInit(unsigned flags) {
  return call("cuInit", Needs::kNothing, [&] {
    state().initialized_by = getpid();
    return flags == 0 ? kSuccess : kInvalidValue;
  });
}

Result cuDriverGetVersion(int* version) {
  return call("cuDriverGetVersion", Needs::kNothing, [&] {
    *version = 13000;
    return kSuccess;
  });
}

Result cuGetErrorName(Result error, const char** name) {
  return call("cuGetErrorName", Needs::kNothing, [&] {
    static const std::map<Result, const char*> names = {{kInvalidValue, "CUDA_ERROR_INVALID_VALUE"},
                                                        {kNotInitialized, "CUDA_ERROR_NOT_INITIALIZED"},
                                                        {kInvalidDevice, "CUDA_ERROR_INVALID_DEVICE"},
                                                        {kInvalidContext, "CUDA_ERROR_INVALID_CONTEXT"},
                                                        {kInvalidHandle, "CUDA_ERROR_INVALID_HANDLE"}};
    const auto found = names.find(error);
    *name = found == names.end() ? nullptr : found->second;
    return found == names.end() ? kInvalidValue : kSuccess;
  });
}

Result cuDeviceGet(int* device, int ordinal) {
  return call("cuDeviceGet", Needs::kInit, [&] {
    *device = ordinal;
    return ordinal == 0 || ordinal == 1 ? kSuccess : kInvalidDevice;
  });
}

Result cuDevicePrimaryCtxRetain(CUctx_st** context, int device) {
  return call("cuDevicePrimaryCtxRetain", Needs::kInit, [&] {
    *context = standin_primary(device);
    ++(*context)->retains;
    return disturb_captures("cuDevicePrimaryCtxRetain");
  });
}

Result cuCtxGetCurrent(CUctx_st** context) {
  return call("cuCtxGetCurrent", Needs::kInit, [&] {
    *context = standin_current();
    return kSuccess;
  });
}

Result cuCtxPushCurrent_v2(CUctx_st* context) {
  return call("cuCtxPushCurrent_v2", Needs::kInit, [&] {
    if (context == nullptr) {
      return violate("cuCtxPushCurrent_v2 of no context", kInvalidContext);
    }
    stack.push_back(context);
    return kSuccess;
  });
}

Result cuCtxPopCurrent_v2(CUctx_st** context) {
  return call("cuCtxPopCurrent_v2", Needs::kContext, [&] {
    *context = stack.back();
    stack.pop_back();
    return kSuccess;
  });
}

Result cuThreadExchangeStreamCaptureMode(int* mode) {
  return call("cuThreadExchangeStreamCaptureMode", Needs::kInit, [&] {
    std::swap(*mode, capture_mode);
    return kSuccess;
  });
}

Result cuStreamIsCapturing(CUstream_st* stream, int* status) {
  return call("cuStreamIsCapturing", Needs::kContext, [&] {
    const CUstream_st* real = stream_or_default(stream);
    const Capture* capture = capture_of(real);
    *status = capture == nullptr ? 0 : capture->is_valid ? 1 : 2;
    return capture != nullptr && capture->stream != real ? kCaptureImplicit : kSuccess;
  });
}

Result cuEventCreate(CUevent_st** event, unsigned /*flags*/) {
  return call("cuEventCreate", Needs::kContext, [&] {
    State& all = state();
    *event = &all.events.emplace_back(CUevent_st{stack.back()});
    ++all.live_events;
    return disturb_captures("cuEventCreate");
  });
}

Result cuEventRecord(CUevent_st* event, CUstream_st* stream) {
  return call("cuEventRecord", Needs::kContext, [&] {
    if (const Result result = check("cuEventRecord", event); result != kSuccess) {
      return result;
    }
    const CUstream_st* real = stream_or_default(stream);
    if (event->context != real->context) {
      return violate("cuEventRecord on a stream of another context", kInvalidHandle);
    }
    if (Capture* capture = capture_of(real); capture != nullptr) {
      capture->is_valid = false;
      event->is_captured = true;
      return violate("cuEventRecord into a capture", capture->stream == real ? kSuccess : kCaptureImplicit);
    }
    event->is_captured = false;
    event->is_recorded = true;
    event->time = std::max(state().now, real->busy_until);
    return kSuccess;
  });
}

Result cuEventQuery(CUevent_st* event) {
  return call("cuEventQuery", Needs::kContext, [&] {
    if (const Result result = check("cuEventQuery", event); result != kSuccess) {
      return result;
    }
    if (const Result result = disturb_captures("cuEventQuery"); result != kSuccess) {
      return result;
    }
    if (event->is_captured) {
      return kCapturedEvent;
    }
    return event->time > state().now ? kNotReady : kSuccess;
  });
}

Result cuEventElapsedTime(float* milliseconds, CUevent_st* start, CUevent_st* stop) {
  return call("cuEventElapsedTime", Needs::kContext,
              [&] { return elapsed("cuEventElapsedTime", milliseconds, start, stop); });
}

Result cuEventElapsedTime_v2(float* milliseconds, CUevent_st* start, CUevent_st* stop) {
  return call("cuEventElapsedTime_v2", Needs::kContext,
              [&] { return elapsed("cuEventElapsedTime_v2", milliseconds, start, stop); });
}

Result cuEventDestroy_v2(CUevent_st* event) {
  return call("cuEventDestroy_v2", Needs::kContext, [&] {
    if (const Result result = check("cuEventDestroy_v2", event); result != kSuccess) {
      return result;
    }
    event->is_alive = false;
    --state().live_events;
    return disturb_captures("cuEventDestroy_v2");
  });
}

void standin_reset() {
  const std::lock_guard lock(state().mutex);
  state().violations = 0;
  state().violation.clear();
  for (auto& [name, function] : state().functions) {
    function = FunctionState{};
  }
}

std::int64_t standin_violations() {
  const std::lock_guard lock(state().mutex);
  return state().violations;
}

const char* standin_violation() { return state().violation.c_str(); }

std::int64_t standin_advance(std::int64_t ns) {
  const std::lock_guard lock(state().mutex);
  return state().now += ns;
}

void standin_enqueue(CUstream_st* stream, std::int64_t ns) {
  const std::lock_guard lock(state().mutex);
  CUstream_st* real = stream_or_default(stream);
  real->busy_until = std::max(real->busy_until, state().now) + ns;
}

CUctx_st* standin_primary(int device) { return &state().primary.at(static_cast<std::size_t>(device)); }

CUctx_st* standin_context() {
  const std::lock_guard lock(state().mutex);
  CUctx_st* context = &state().contexts.emplace_back();
  context->default_stream.context = context;
  return context;
}

CUstream_st* standin_stream(int device, int is_blocking) {
  const std::lock_guard lock(state().mutex);
  return &state().streams.emplace_back(
      CUstream_st{.context = standin_primary(device), .is_blocking = is_blocking != 0});
}

void standin_set_current(CUctx_st* context) {
  stack.clear();
  if (context != nullptr) {
    stack.push_back(context);
  }
}

CUctx_st* standin_current() { return stack.empty() ? nullptr : stack.back(); }

int standin_depth() { return static_cast<int>(stack.size()); }

void standin_begin_capture(CUstream_st* stream, int mode) {
  const std::lock_guard lock(state().mutex);
  state().captures.push_back({stream, mode, std::this_thread::get_id()});
}

int standin_end_capture(CUstream_st* stream) {
  const std::lock_guard lock(state().mutex);
  auto& captures = state().captures;
  const auto found = std::find_if(captures.begin(), captures.end(),
                                  [stream](const Capture& capture) { return capture.stream == stream; });
  const bool is_valid = found != captures.end() && found->is_valid;
  if (found != captures.end()) {
    captures.erase(found);
  }
  return is_valid ? kSuccess : kCaptureInvalidated;
}

void standin_fail(const char* function, std::int64_t nth, std::int64_t times, int result) {
  const std::lock_guard lock(state().mutex);
  FunctionState& told = function_named(function);
  told.fail_from = told.calls + nth;
  told.fail_until = told.fail_from + times;
  told.failure = result;
}

std::int64_t standin_calls(const char* function) {
  const std::lock_guard lock(state().mutex);
  return function_named(function).calls;
}

std::int64_t standin_live_events() {
  const std::lock_guard lock(state().mutex);
  return state().live_events;
}

int standin_retains(int device) {
  const std::lock_guard lock(state().mutex);
  return standin_primary(device)->retains;
}
}
