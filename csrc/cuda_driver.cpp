#include "cuda_driver.hpp"

#include <dlfcn.h>
#include <pthread.h>

#include <atomic>

namespace chronica::cuda {

namespace {

std::atomic<bool> is_lost = false;

/// Find a function, under its older name if it has one; false if there is none.
template <class... Parameters>
bool find(void* library, Function<Parameters...>& function, const char* older_name = nullptr) {
  for (const char* name : {function.name, older_name}) {
    void* address = name == nullptr ? nullptr : dlsym(library, name);
    if (address != nullptr) {
      function.name = name;
      function.address = reinterpret_cast<typename Function<Parameters...>::Type*>(address);
      return true;
    }
  }
  return false;
}

std::string version_of(const Driver& driver) {
  int version = 0;
  if (driver.driver_version.address == nullptr || driver.driver_version(&version) != kSuccess) {
    return "of an unknown version";
  }
  return "for CUDA " + std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

}  // namespace

Driver load(const char* library) {
  Driver driver;
  void* handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* reason = dlerror();
    driver.problem = "the CUDA driver cannot be loaded: " + std::string(reason == nullptr ? library : reason);
    return driver;
  }
  const auto require = [handle, library, &driver](auto& function, const char* older_name = nullptr) {
    if (!find(handle, function, older_name) && driver.problem.empty()) {
      driver.problem =
          "the CUDA driver " + std::string(library) + ", " + version_of(driver) + ", has no " + function.name;
    }
  };
  require(driver.driver_version);
  require(driver.init);
  require(driver.error_name);
  require(driver.device_get);
  require(driver.primary_context_retain);
  require(driver.context_current);
  require(driver.context_push);
  require(driver.context_pop);
  require(driver.event_create);
  require(driver.event_record);
  require(driver.event_query);
  require(driver.event_elapsed, "cuEventElapsedTime");
  require(driver.event_destroy);
  require(driver.stream_is_capturing);
  require(driver.exchange_capture_mode);
  return driver;
}

const Driver& driver() {
  static const Driver loaded = load("libcuda.so.1");
  return loaded;
}

std::string describe(const Driver& driver, const char* function, Result result) {
  const char* name = nullptr;
  if (driver.error_name(result, &name) != kSuccess || name == nullptr) {
    name = "unknown error";
  }
  return std::string(function) + ": " + name + " (" + std::to_string(result) + ")";
}

void begin_use() {
  // fork() itself tells: asking for the process id at each call would cost more than all the rest of it.
  [[maybe_unused]] static const int registered = pthread_atfork(nullptr, nullptr, [] { is_lost = true; });
}

bool is_lost_by_fork() noexcept { return is_lost; }

}  // namespace chronica::cuda
