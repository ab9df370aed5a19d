// The planner for Python. Arguments are parsed and checked while the GIL is held; the planner then works on plain
// memory that the caller's arrays keep alive, so the GIL is released around it.

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
#include "timer_bindings.hpp"
#include "weight_bindings.hpp"
#include "window.hpp"

namespace py = pybind11;

namespace {

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

}  // namespace

PYBIND11_MODULE(_core, module) {
  module.doc() = "The compiled part of chronica_hvd: private; its types are in _core.pyi.";
  register_timer(module);
  register_weight(module);
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
