// Nothing to run: compiled where a toolkit's cuda.h is found, to hold the prototypes declared in cuda_driver.hpp
// against it.

#include <cuda.h>

#include <type_traits>

#include "cuda_driver.hpp"

namespace {

/// Whether values of two types are passed alike: they are the same, or an int stands for an enum of its size.
template <class Ours, class Theirs>
constexpr bool is_alike = std::is_same_v<Ours, Theirs>;

template <class Theirs>
  requires std::is_enum_v<Theirs>
constexpr bool is_alike<int, Theirs> = sizeof(Theirs) == sizeof(int);

template <class Ours, class Theirs>
constexpr bool is_alike<Ours*, Theirs*> = is_alike<Ours, Theirs>;

template <class Result, class... Parameters, class TheirResult, class... TheirParameters>
constexpr bool is_alike<Result(Parameters...), TheirResult(TheirParameters...)> = [] {
  if constexpr (sizeof...(Parameters) == sizeof...(TheirParameters)) {
    return is_alike<Result, TheirResult> && (is_alike<Parameters, TheirParameters> && ...);
  }
  return false;
}();

#if CUDA_VERSION >= 11080  // an older toolkit is no reason not to build

#define CHECK_PROTOTYPE(member, symbol) \
  static_assert(is_alike<decltype(chronica::cuda::Driver::member)::Type, decltype(symbol)>, #symbol)

CHECK_PROTOTYPE(init, cuInit);
CHECK_PROTOTYPE(driver_version, cuDriverGetVersion);
CHECK_PROTOTYPE(error_name, cuGetErrorName);
CHECK_PROTOTYPE(device_get, cuDeviceGet);
CHECK_PROTOTYPE(primary_context_retain, cuDevicePrimaryCtxRetain);
CHECK_PROTOTYPE(context_current, cuCtxGetCurrent);
CHECK_PROTOTYPE(context_push, cuCtxPushCurrent_v2);
CHECK_PROTOTYPE(context_pop, cuCtxPopCurrent_v2);
CHECK_PROTOTYPE(event_create, cuEventCreate);
CHECK_PROTOTYPE(event_record, cuEventRecord);
CHECK_PROTOTYPE(event_query, cuEventQuery);
CHECK_PROTOTYPE(event_elapsed, cuEventElapsedTime);  // a macro for _v2 where there is one
CHECK_PROTOTYPE(event_destroy, cuEventDestroy_v2);
CHECK_PROTOTYPE(stream_is_capturing, cuStreamIsCapturing);
CHECK_PROTOTYPE(exchange_capture_mode, cuThreadExchangeStreamCaptureMode);

static_assert(chronica::cuda::kSuccess == CUDA_SUCCESS && chronica::cuda::kNotReady == CUDA_ERROR_NOT_READY);
static_assert(chronica::cuda::kCaptureUnsupported == CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
static_assert(chronica::cuda::kCaptureWrongThread == CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD);
static_assert(chronica::cuda::kRelaxed == CU_STREAM_CAPTURE_MODE_RELAXED);
static_assert(chronica::cuda::kNotCapturing == CU_STREAM_CAPTURE_STATUS_NONE);

#endif

}  // namespace
