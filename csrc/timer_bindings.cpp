// The timer for Python: one type, whatever the clock. All of it runs under the GIL, which serialises threads that share
// a timer; nothing of it waits, so there is nothing to release the GIL for. Only a clock written in Python may hand the
// GIL to another thread in the middle of a call, so such a timer has a lock of its own.
//
// The hot methods only read a clock and keep it; pybind11's own dispatch of keywords costs several times that.

#include "timer_bindings.hpp"

#include <pybind11/numpy.h>

#include <cstdint>
#include <mutex>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <variant>
#include <vector>

#include "clock_bindings.hpp"
#include "cuda_driver.hpp"
#include "event_clock.hpp"
#include "fast_methods.hpp"
#include "steady_clock.hpp"
#include "step_timer.hpp"

namespace py = pybind11;

namespace {

using chronica::Record;
using chronica::Work;
using HostTimer = chronica::StepTimer<chronica::SteadyClock>;
using EventTimer = chronica::StepTimer<chronica::EventClock>;
using PythonTimer = chronica::StepTimer<PythonClock>;

/// Where events are recorded: asked of Python before the timer is touched, the device once and the stream each time.
class CurrentStream {
 public:
  CurrentStream(py::object device, py::object current_stream)
      : device_(std::move(device)), current_stream_(std::move(current_stream)) {}

  int device() {
    // What is called may let another thread in here, so this holds on to what it uses.
    py::object held = device_;
    if (PyCallable_Check(held.ptr()) != 0) {
      held = held();
      device_ = held;
    }
    const long index = PyLong_AsLong(held.ptr());
    raise_if_failed();
    if (!std::in_range<int>(index)) {
      throw py::value_error("device must be the index of a device, not " + std::to_string(index));
    }
    return static_cast<int>(index);
  }

  chronica::cuda::Stream stream() {
    const py::object held = device_;
    PyObject* arguments[] = {held.ptr()};
    const py::object handle = checked(PyObject_Vectorcall(current_stream_.ptr(), arguments, 1, nullptr));
    void* stream = PyLong_AsVoidPtr(handle.ptr());
    raise_if_failed();
    return static_cast<chronica::cuda::Stream>(stream);
  }

 private:
  static void raise_if_failed() {
    if (PyErr_Occurred() != nullptr) {
      throw py::error_already_set();
    }
  }

  py::object device_;  // an index, or until the first start a function that returns one
  py::object current_stream_;
};

/// What is inside a Python object of the type.
class Timer {
 public:
  Timer(std::size_t capacity, const py::object& device, const py::object& current_stream, const py::object& clock)
      : kind_(choose(capacity, device, current_stream, clock)), place_(device, current_stream) {}

  void start(const Work& work) {
    if (auto* host = std::get_if<HostTimer>(&kind_)) {
      host->start(work);
    } else if (auto* events = std::get_if<EventTimer>(&kind_)) {
      // Nor may torch be asked then: it would refuse, and nothing would be recorded anyway.
      const bool is_lost = chronica::cuda::is_lost_by_fork();
      const int device = is_lost ? 0 : place_.device();
      events->start(work, device, is_lost ? nullptr : place_.stream());
    } else {
      const Turn turn(*this);
      std::get<PythonTimer>(kind_).start(work);
    }
  }

  /// Do something with the timer, whichever it is.
  template <class Action>
  auto with(Action action) {
    if (auto* python = std::get_if<PythonTimer>(&kind_)) {
      const Turn turn(*this);
      return action(*python);
    }
    return std::visit(action, kind_);
  }

 private:
  using Kind = std::variant<HostTimer, EventTimer, PythonTimer>;

  /// One thread at a time, to the end of its call, though its clock may release the GIL.
  class Turn {
   public:
    explicit Turn(Timer& timer) : timer_(timer) {
      if (timer.owner_ == std::this_thread::get_id()) {
        throw std::runtime_error("a StepTimer's clock must not call this timer");
      }
      if (!timer.lock_.try_lock()) {
        const py::gil_scoped_release release;
        timer.lock_.lock();
      }
      timer.owner_ = std::this_thread::get_id();
    }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;
    ~Turn() {
      timer_.owner_ = std::thread::id();
      timer_.lock_.unlock();
    }

   private:
    Timer& timer_;
  };

  static Kind choose(std::size_t capacity, const py::object& device, const py::object& current_stream,
                     const py::object& clock) {
    if (!clock.is_none()) {
      if (!device.is_none() || !current_stream.is_none()) {
        throw py::type_error("StepTimer() takes either device and current_stream, or clock");
      }
      return Kind(std::in_place_type<PythonTimer>, capacity, PythonClock(clock));
    }
    if (device.is_none() && current_stream.is_none()) {
      return Kind(std::in_place_type<HostTimer>, capacity);
    }
    if (!PyLong_Check(device.ptr()) && PyCallable_Check(device.ptr()) == 0) {
      throw py::type_error("device must be an int, or a function that returns one, not " +
                           std::string(py::repr(device)));
    }
    if (PyCallable_Check(current_stream.ptr()) == 0) {
      throw py::type_error("current_stream must be a function of the device that returns a stream as an int, not " +
                           std::string(py::repr(current_stream)));
    }
    return Kind(std::in_place_type<EventTimer>, capacity, chronica::EventClock(capacity + 1));
  }

  Kind kind_;
  CurrentStream place_;
  std::mutex lock_;        // for a clock written in Python
  std::thread::id owner_;  // of the lock; read and written under the GIL
};

constexpr const char* kStartNames[] = {"step", "samples", "size", "size2", "flops"};
constexpr Py_ssize_t kStartCount = 5;
PyObject* start_names[kStartCount];  // the same, interned: a keyword is found by its address

/// The place of a keyword of `start`, or -1.
Py_ssize_t find_start_name(PyObject* keyword) {
  for (Py_ssize_t i = 0; i < kStartCount; ++i) {
    if (keyword == start_names[i]) {
      return i;
    }
  }
  for (Py_ssize_t i = 0; i < kStartCount; ++i) {
    if (PyUnicode_Compare(keyword, start_names[i]) == 0) {
      return i;
    }
  }
  return -1;
}

PyObject* timer_start(PyObject* self, PyObject* const* args, Py_ssize_t positional, PyObject* keywords) {
  std::int64_t values[kStartCount] = {};
  bool given[kStartCount] = {};
  if (positional > kStartCount) {
    PyErr_Format(PyExc_TypeError,
                 "start() takes at most 5 arguments (step, samples, size, size2, flops), %zd were given", positional);
    return nullptr;
  }
  const Py_ssize_t named = keywords == nullptr ? 0 : PyTuple_GET_SIZE(keywords);
  for (Py_ssize_t i = 0; i < positional + named; ++i) {
    Py_ssize_t place = i;
    if (i >= positional) {
      PyObject* keyword = PyTuple_GET_ITEM(keywords, i - positional);
      place = find_start_name(keyword);
      if (place < 0) {
        PyErr_Format(PyExc_TypeError, "start() has no argument %R; it takes step, samples, size, size2, flops",
                     keyword);
        return nullptr;
      }
    }
    if (given[place]) {
      PyErr_Format(PyExc_TypeError, "start() got %s twice", kStartNames[place]);
      return nullptr;
    }
    given[place] = true;
    values[place] = PyLong_AsLongLong(args[i]);
    if (values[place] == -1 && PyErr_Occurred() != nullptr) {
      if (PyErr_ExceptionMatches(PyExc_TypeError) != 0 || PyErr_ExceptionMatches(PyExc_RuntimeError) != 0) {
        PyErr_Format(PyExc_TypeError, "%s must be an integer, not %R of type %s", kStartNames[place], args[i],
                     Py_TYPE(args[i])->tp_name);
      } else if (PyErr_ExceptionMatches(PyExc_OverflowError) != 0) {
        PyErr_Format(PyExc_ValueError, "%s is too large for an int64: %R", kStartNames[place], args[i]);
      }
      return nullptr;
    }
  }
  return call<Timer>(self, [&values](Timer& timer) {
    timer.start({values[0], values[1], values[2], values[3], values[4]});
    return Py_NewRef(Py_None);
  });
}

PyObject* timer_stop(PyObject* self, PyObject* /*unused*/) {
  return call<Timer>(self, [](Timer& timer) {
    if (!timer.with([](auto& kind) { return kind.stop(); })) {
      throw std::runtime_error("stop() without start()");
    }
    return Py_NewRef(Py_None);
  });
}

PyObject* timer_extend(PyObject* self, PyObject* /*unused*/) {
  return call<Timer>(self, [](Timer& timer) {
    timer.with([](auto& kind) { kind.extend(); });
    return Py_NewRef(Py_None);
  });
}

/// The timer inside any Python object. pybind11's own conversion would make up one whose __init__ has not run.
Timer& checked_timer(const py::object& self) {
  if (!py::isinstance<Timer>(self)) {
    throw py::type_error("a StepTimer is needed");
  }
  Timer* timer = object_in<Timer>(self.ptr());
  if (timer == nullptr) {
    throw py::error_already_set();
  }
  return *timer;
}

PyMethodDef timer_methods[] = {
    {"start", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&timer_start)), METH_FASTCALL | METH_KEYWORDS,
     "start($self, step=0, samples=0, size=0, size2=0, flops=0)\n--\n\nBegin a measurement of the given work."},
    {"stop", &timer_stop, METH_NOARGS, "stop($self)\n--\n\nEnd the measurement that start() began."},
    {"extend", &timer_extend, METH_NOARGS,
     "extend($self)\n--\n\nLet the measurement stopped last end now instead, unless it was drained or skipped."},
};

py::array drain(const py::object& self) {
  const std::vector<Record> records = checked_timer(self).with([](auto& kind) { return kind.drain(); });
  // One flat dtype instead of a nested one: a record is seven int64 without padding.
  static_assert(sizeof(Record) == 7 * sizeof(std::int64_t));
  py::list fields;
  for (const char* name : {"step", "samples", "size", "size2", "flops", "start_ns", "elapsed_ns"}) {
    fields.append(py::make_tuple(name, "<i8"));
  }
  const py::dtype dtype = py::dtype::from_args(fields);
  return py::array(dtype, {static_cast<py::ssize_t>(records.size())}, records.data());
}

/// A text, or None for the empty one.
py::object text_or_none(std::string_view text) {
  return text.empty() ? py::object(py::none()) : py::object(py::str(text));
}

/// What Python reads from a timer.
template <class Get>
auto reader(Get get) {
  return [get](const py::object& self) { return checked_timer(self).with(get); };
}

}  // namespace

void register_timer(py::module_& module) {
  for (Py_ssize_t i = 0; i < kStartCount; ++i) {
    start_names[i] = interned(kStartNames[i]).release().ptr();
  }

  py::class_<Timer> timer(module, "StepTimer");
  timer
      .def(py::init<std::size_t, const py::object&, const py::object&, const py::object&>(), py::arg("capacity"),
           py::arg("device") = py::none(), py::arg("current_stream") = py::none(), py::kw_only(),
           py::arg("clock") = py::none())
      .def("drain", &drain)
      .def_property_readonly("overwritten", reader([](auto& kind) { return kind.overwritten(); }))
      .def_property_readonly("skipped", reader([](auto& kind) { return kind.skipped(); }))
      .def_property_readonly("failure", reader([](auto& kind) { return text_or_none(kind.failure()); }))
      .def_property_readonly("clock", reader([](auto& kind) { return std::string(kind.clock_name()); }))
      .def_property_readonly("capacity", reader([](auto& kind) { return kind.capacity(); }));
  add_fast_methods(timer, timer_methods);
  module.def("cuda_driver_problem", [] { return text_or_none(chronica::cuda::driver().problem); });
}
