#pragma once

#include <string>

// The driver's own opaque types, under the names that cuda.h gives them.
struct CUctx_st;
struct CUevent_st;
struct CUstream_st;

/// The CUDA driver (11.8 to 13) as a table of functions, looked up at run time: neither cuda.h nor any CUDA library is
/// needed to build this, and one build serves machines with and without a driver.
namespace chronica::cuda {

using Context = CUctx_st*;
using Event = CUevent_st*;
using Stream = CUstream_st*;
using Device = int;

/// A CUresult. Only the values that are told apart here have a name.
using Result = int;
inline constexpr Result kSuccess = 0;
inline constexpr Result kNotReady = 600;
inline constexpr Result kCaptureUnsupported = 900;  // the first of the errors about stream capture
inline constexpr Result kCaptureWrongThread = 908;  // the last of them

/// Whether an error only says that a stream is being captured into a graph.
constexpr bool is_capture(Result result) noexcept {
  return kCaptureUnsupported <= result && result <= kCaptureWrongThread;
}

/// A CUstreamCaptureMode: of a thread that harms no capture, whatever it calls.
inline constexpr int kRelaxed = 2;
/// A CUstreamCaptureStatus.
inline constexpr int kNotCapturing = 0;

/// A function of the driver: the name it was found under, and where.
template <class... Parameters>
struct Function {
  using Type = Result(Parameters...);

  const char* name;
  Type* address = nullptr;

  Result operator()(Parameters... arguments) const { return address(arguments...); }
};

struct Driver {
  Function<unsigned> init{"cuInit"};
  Function<int*> driver_version{"cuDriverGetVersion"};
  Function<Result, const char**> error_name{"cuGetErrorName"};
  Function<Device*, int> device_get{"cuDeviceGet"};
  Function<Context*, Device> primary_context_retain{"cuDevicePrimaryCtxRetain"};
  Function<Context*> context_current{"cuCtxGetCurrent"};
  Function<Context> context_push{"cuCtxPushCurrent_v2"};
  Function<Context*> context_pop{"cuCtxPopCurrent_v2"};
  Function<Event*, unsigned> event_create{"cuEventCreate"};
  Function<Event, Stream> event_record{"cuEventRecord"};
  Function<Event> event_query{"cuEventQuery"};
  Function<float*, Event, Event> event_elapsed{"cuEventElapsedTime_v2"};  // CUDA 12.8; else cuEventElapsedTime
  Function<Event> event_destroy{"cuEventDestroy_v2"};
  Function<Stream, int*> stream_is_capturing{"cuStreamIsCapturing"};
  Function<int*> exchange_capture_mode{"cuThreadExchangeStreamCaptureMode"};

  std::string problem;  // why none of it may be called; empty if all of it may
};

/// Look the functions up in a library, which stays loaded. Calls none that initialises the driver.
Driver load(const char* library);

/// The table of this machine's driver, looked up at the first call.
const Driver& driver();

/// A result in words, like "cuEventRecord: CUDA_ERROR_INVALID_CONTEXT (201)".
std::string describe(const Driver& driver, const char* function, Result result);

/// Say that this process uses the driver from now on; before the first call of `init`.
void begin_use();

/// Whether this process was forked from one that used the driver: then nothing of it may be called.
bool is_lost_by_fork() noexcept;

}  // namespace chronica::cuda
