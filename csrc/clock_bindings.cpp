#include "clock_bindings.hpp"

#include "steady_clock.hpp"

namespace py = pybind11;
using chronica::Reading;

namespace {

py::object method_of(const py::object& clock, const char* name) {
  py::object method = py::getattr(clock, name, py::none());
  if (PyCallable_Check(method.ptr()) == 0) {
    throw py::type_error(
        "a clock needs the methods begin(), end(interval), ready(interval) and elapsed_ns(interval); " +
        std::string(py::repr(clock)) + " has no " + name);
  }
  return method;
}

}  // namespace

PythonClock::PythonClock(const py::object& clock)
    : begin_(method_of(clock, "begin")),
      end_(method_of(clock, "end")),
      ready_(method_of(clock, "ready")),
      elapsed_ns_(method_of(clock, "elapsed_ns")) {
  const py::object name = py::getattr(clock, "name", py::none());
  if (!py::isinstance<py::str>(name)) {
    throw py::type_error("a clock needs a name, a str; that of " + std::string(py::repr(clock)) + " is " +
                         std::string(py::repr(name)));
  }
  name_ = py::cast<std::string>(name);
}

/// What the action returns, or `otherwise` where it raises an Exception.
template <class Result, class Action>
Result PythonClock::attempt(Result otherwise, Action action) {
  try {
    return action();
  } catch (py::error_already_set& error) {
    if (!error.matches(PyExc_Exception)) {
      throw;
    }
    failure_ = error.what();
    return otherwise;
  }
}

bool PythonClock::begin(Interval& interval) {
  interval.start_ns = chronica::steady_ns();
  return attempt(false, [&] {
    interval.handle = begin_();
    return !interval.handle.is_none();
  });
}

bool PythonClock::end(Interval& interval) {
  return attempt(false, [&] { return bool(py::bool_(end_(interval.handle))); });
}

Reading PythonClock::read(const Interval& interval) {
  return attempt(Reading{Reading::State::kLost}, [&] {
    if (!py::bool_(ready_(interval.handle))) {
      return Reading{Reading::State::kPending};
    }
    const py::object elapsed = elapsed_ns_(interval.handle);
    const std::int64_t elapsed_ns = PyLong_AsLongLong(elapsed.ptr());
    if (elapsed_ns == -1 && PyErr_Occurred() != nullptr) {
      throw py::error_already_set();
    }
    return Reading{Reading::State::kComplete, elapsed_ns};
  });
}
