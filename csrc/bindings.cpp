// The only file that knows Python. Arguments are parsed and checked while the GIL is held; the planner then works on
// plain memory that the caller's arrays keep alive, so the GIL is released around it. The timer's two hot methods only
// read a clock and keep it; they are METH_FASTCALL methods, because pybind11's own dispatch of keywords costs several
// times what they do.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "assign.hpp"
#include "permutation.hpp"
#include "policies.hpp"
#include "steady_clock.hpp"
#include "step_timer.hpp"
#include "window.hpp"

namespace py = pybind11;

namespace {

using chronica::Record;
using chronica::Work;
using Timer = chronica::StepTimer<chronica::SteadyClock>;

/// Hand a vector to numpy without copying it.
template <class T>
py::array_t<T> to_array(std::vector<T>&& values) {
  auto owner = std::make_unique<std::vector<T>>(std::move(values));
  const std::vector<T>& kept = *owner;
  const py::capsule base(owner.release(), [](void* pointer) { delete static_cast<std::vector<T>*>(pointer); });
  return py::array_t<T>(static_cast<py::ssize_t>(kept.size()), kept.data(), base);
}

using Doubles = py::array_t<double, py::array::c_style>;

std::span<const double> as_span(const Doubles& array, const char* name) {
  if (array.ndim() != 1 || array.size() == 0) {
    throw py::value_error(std::string(name) + " must be a one-dimensional array with at least one value");
  }
  return {array.data(), static_cast<std::size_t>(array.size())};
}

py::tuple assign(const Doubles& costs, const Doubles& sizes, const Doubles& speeds, const Doubles& capacity,
                 double fixed_cost, bool is_hard, std::int64_t global_batch, std::int64_t least,
                 std::int64_t micro_batches, double comm, bool padded, bool equal_counts, bool is_dealt,
                 std::int64_t threads) {
  const chronica::Block block{as_span(costs, "costs"),
                              as_span(sizes, "sizes"),
                              fixed_cost,
                              as_span(speeds, "speeds"),
                              as_span(capacity, "capacity"),
                              is_hard,
                              global_batch,
                              least,
                              micro_batches,
                              comm,
                              padded,
                              equal_counts,
                              is_dealt};
  if (sizes.size() != costs.size() || capacity.size() != speeds.size()) {
    throw py::value_error("costs and sizes, and speeds and capacity, must be of the same length");
  }
  if (global_batch < speeds.size() || least < 1 || micro_batches < 1) {
    throw py::value_error("global_batch must be at least the number of ranks, least and micro_batches at least 1");
  }
  chronica::Assignment result;
  {
    const py::gil_scoped_release release;
    result = chronica::assign(block, threads);
  }
  return py::make_tuple(
      to_array(std::move(result.positions)), to_array(std::move(result.sizes)), to_array(std::move(result.lengths)),
      to_array(std::move(result.parts)), to_array(std::move(result.counts)), to_array(std::move(result.loads)),
      to_array(std::move(result.tails)), to_array(std::move(result.lower_bounds)), result.infeasible_step);
}

py::array_t<std::int64_t> regroup(const Doubles& costs, const Doubles& speeds, double fixed_cost,
                                  std::int64_t global_batch, std::int64_t most_moved) {
  const chronica::Window window{as_span(costs, "costs"), fixed_cost, as_span(speeds, "speeds"), global_batch,
                                most_moved};
  if (global_batch < speeds.size() || costs.size() % global_batch != 0) {
    throw py::value_error("global_batch must be at least the number of ranks, and all steps full");
  }
  std::vector<std::int64_t> order;
  {
    const py::gil_scoped_release release;
    order = chronica::regroup(window);
  }
  return to_array(std::move(order));
}

py::array_t<std::int64_t> deal(const Doubles& costs, const Doubles& speeds, const std::string& policy,
                               double fixed_cost, std::int64_t global_batch, std::uint64_t seed) {
  static const std::map<std::string, chronica::Policy> policies = {{"static", chronica::Policy::kStatic},
                                                                   {"dynamic", chronica::Policy::kDynamic},
                                                                   {"guided", chronica::Policy::kGuided}};
  const chronica::Pool pool{as_span(costs, "costs"), fixed_cost, as_span(speeds, "speeds"), global_batch, seed};
  const auto found = policies.find(policy);
  if (found == policies.end() || global_batch < speeds.size() || global_batch % speeds.size() != 0) {
    throw py::value_error("policy must be known, and global_batch a multiple of the number of ranks");
  }
  std::vector<std::int64_t> order;
  {
    const py::gil_scoped_release release;
    order = chronica::deal(found->second, pool);
  }
  return to_array(std::move(order));
}

py::array_t<std::int64_t> permutation(std::int64_t n, std::uint64_t seed) {
  if (n < 0) {
    throw py::value_error("n must not be negative");
  }
  std::vector<std::int64_t> order;
  {
    const py::gil_scoped_release release;
    order = chronica::permutation(n, seed);
  }
  return to_array(std::move(order));
}

/// The timer inside a Python object that is known to be one; null (with an error set) before its __init__ has run.
Timer* timer_of(PyObject* self) {
  auto* instance = reinterpret_cast<py::detail::instance*>(self);
  auto* timer = static_cast<Timer*>(instance->get_value_and_holder().value_ptr());
  if (timer == nullptr) {
    PyErr_SetString(PyExc_RuntimeError, "StepTimer.__init__() was not called");
  }
  return timer;
}

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
      return nullptr;
    }
  }
  Timer* timer = timer_of(self);
  if (timer == nullptr) {
    return nullptr;
  }
  timer->start({values[0], values[1], values[2], values[3], values[4]});
  Py_RETURN_NONE;
}

PyObject* timer_stop(PyObject* self, PyObject* /*unused*/) {
  Timer* timer = timer_of(self);
  if (timer == nullptr) {
    return nullptr;
  }
  if (!timer->stop()) {
    PyErr_SetString(PyExc_RuntimeError, "stop() without start()");
    return nullptr;
  }
  Py_RETURN_NONE;
}

/// The timer inside any Python object. pybind11's own conversion would make up one whose __init__ has not run.
Timer& checked_timer(const py::object& self) {
  if (!py::isinstance<Timer>(self)) {
    throw py::type_error("a StepTimer is needed");
  }
  Timer* timer = timer_of(self.ptr());
  if (timer == nullptr) {
    throw py::error_already_set();
  }
  return *timer;
}

PyMethodDef timer_methods[] = {
    {"start", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&timer_start)), METH_FASTCALL | METH_KEYWORDS,
     "start($self, step=0, samples=0, size=0, size2=0, flops=0)\n--\n\nBegin a measurement of the given work."},
    {"stop", &timer_stop, METH_NOARGS, "stop($self)\n--\n\nEnd the measurement that start() began."},
};

void register_timer(py::module_& module) {
  for (Py_ssize_t i = 0; i < kStartCount; ++i) {
    start_names[i] = PyUnicode_InternFromString(kStartNames[i]);
  }

  py::class_<Timer> timer(module, "StepTimer");
  timer.def(py::init<std::size_t>(), py::arg("capacity"))
      .def("drain",
           [](const py::object& self) {
             const std::vector<Record> records = checked_timer(self).drain();
             // One flat dtype instead of a nested one: a record is seven int64 without padding.
             static_assert(sizeof(Record) == 7 * sizeof(std::int64_t));
             py::list fields;
             for (const char* name : {"step", "samples", "size", "size2", "flops", "start_ns", "elapsed_ns"}) {
               fields.append(py::make_tuple(name, "<i8"));
             }
             const py::dtype dtype = py::dtype::from_args(fields);
             return py::array(dtype, {static_cast<py::ssize_t>(records.size())}, records.data());
           })
      .def_property_readonly("overwritten", [](const py::object& self) { return checked_timer(self).overwritten(); })
      .def_property_readonly("capacity", [](const py::object& self) { return checked_timer(self).capacity(); });
  for (PyMethodDef& method : timer_methods) {
    auto* type = reinterpret_cast<PyTypeObject*>(timer.ptr());
    timer.attr(method.ml_name) = py::reinterpret_steal<py::object>(PyDescr_NewMethod(type, &method));
  }
}

}  // namespace

PYBIND11_MODULE(_core, module) {
  module.doc() = "The compiled part of chronica_hvd: private; its types are in _core.pyi.";
  register_timer(module);
  module.def("assign", &assign, py::arg("costs").noconvert(), py::arg("sizes").noconvert(),
             py::arg("speeds").noconvert(), py::arg("capacity").noconvert(), py::kw_only(), py::arg("fixed_cost"),
             py::arg("is_hard"), py::arg("global_batch"), py::arg("least"), py::arg("micro_batches"), py::arg("comm"),
             py::arg("padded"), py::arg("equal_counts"), py::arg("is_dealt"), py::arg("threads"));
  module.def("regroup", &regroup, py::arg("costs").noconvert(), py::arg("speeds").noconvert(), py::kw_only(),
             py::arg("fixed_cost"), py::arg("global_batch"), py::arg("most_moved"));
  module.def("deal", &deal, py::arg("costs").noconvert(), py::arg("speeds").noconvert(), py::kw_only(),
             py::arg("policy"), py::arg("fixed_cost"), py::arg("global_batch"), py::arg("seed"));
  module.def("permutation", &permutation, py::arg("n"), py::arg("seed"));
}
