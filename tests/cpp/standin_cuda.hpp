#pragma once

#include <cstdint>

#include "cuda_driver.hpp"

// What a test tells the stand-in for the CUDA driver, and asks of it. Plain C names, so that Python can call them too.
extern "C" {

/// Forget violations, injected failures and counts of calls. Contexts, events, captures and time stay.
void standin_reset();
/// What was done that a real driver punishes, be it by an error, a spoilt capture or a crash: how often, and the last.
std::int64_t standin_violations();
const char* standin_violation();

/// Let the device's time go on, or only ask for it (0). In nanoseconds.
std::int64_t standin_advance(std::int64_t ns);
/// Give a stream work of so many nanoseconds; the null stream is the current context's.
void standin_enqueue(CUstream_st* stream, std::int64_t ns);

/// The primary context of a device (0 or 1), whether or not anybody retains it; and a new one that is none.
CUctx_st* standin_primary(int device);
CUctx_st* standin_context();
/// A new stream of the device's primary context. A blocking one has to do with the null stream.
CUstream_st* standin_stream(int device, int is_blocking);
/// Make a context the only one of this thread's stack; null empties it.
void standin_set_current(CUctx_st* context);
CUctx_st* standin_current();
int standin_depth();

/// Capture a stream, in a CUstreamCaptureMode; the end says CUDA_ERROR_STREAM_CAPTURE_INVALIDATED if somebody spoilt
/// it.
void standin_begin_capture(CUstream_st* stream, int mode);
int standin_end_capture(CUstream_st* stream);

/// Let calls of a function fail: so many of them, from the n-th from now on (1: the next).
void standin_fail(const char* function, std::int64_t nth, std::int64_t times, int result);
std::int64_t standin_calls(const char* function);

std::int64_t standin_live_events();
int standin_retains(int device);
}
