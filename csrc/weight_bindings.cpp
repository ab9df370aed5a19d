// What is done to every gradient, hundreds of times in a step: in Python it took longer than all else of ours. It runs
// under the GIL; what it calls of torch may hand that to another thread, as any Python code of a hook would.

#include "weight_bindings.hpp"

#include <algorithm>
#include <cstdint>
#include <vector>

#include "fast_methods.hpp"

namespace py = pybind11;

namespace {

/// Applies the weight of the backward pass at work to the gradients that reach parameters.
///
/// What a pass has in common is asked of its owner once, at the pass's first gradient: `owner.begin_pass(pass)` returns
/// the weight. The owner is held weakly: autograd's hooks hold this object, which so keeps nobody alive.
class PassWeight {
 public:
  explicit PassWeight(const py::object& owner) : owner_(checked(PyWeakref_NewRef(owner.ptr(), nullptr))) {
    const py::module_ torch = py::module_::import("torch");
    current_pass_ = torch.attr("_C").attr("_current_graph_task_id");
    is_grad_enabled_ = torch.attr("is_grad_enabled");
    strided_ = torch.attr("strided");
    zeros_like_ = torch.attr("zeros_like");
  }

  /// Forget the pass: its step is over.
  void forget() {
    pass_ = -1;
    reached_.clear();
  }

  /// Those of the parameters of which no gradient has come in the pass.
  [[nodiscard]] py::list unreached(const py::iterable& parameters) {
    std::sort(reached_.begin(), reached_.end());
    py::list rest;
    for (const py::handle parameter : parameters) {
      if (!std::binary_search(reached_.begin(), reached_.end(), parameter.ptr())) {
        rest.append(parameter);
      }
    }
    return rest;
  }

  /// What autograd is to accumulate in place of a parameter's gradient (both in a tuple of one); None: just that.
  py::object apply(py::handle parameter, py::handle gradients) {
    // By its number: after a pass that failed half way, what it began with is no longer right. Outside of passes all
    // have the same, -1.
    const auto pass = PyLong_AsLongLong(checked(PyObject_CallNoArgs(current_pass_.ptr())).ptr());
    if ((pass != pass_ || pass < 0) && !begin(pass)) {
      return py::none();
    }
    reached_.push_back(parameter.ptr());
    const py::handle gradient = PyTuple_GetItem(gradients.ptr(), 0);
    if (!gradient) {
      throw py::error_already_set();
    }
    if (is_one_ || gradient.is_none()) {
      return py::none();
    }
    const py::object sum = get(parameter, grad_);
    if (adds_ && is_added_in_place(parameter, sum, gradient)) {
      // A product with an addition costs no more than the addition that autograd would do.
      if (!is_zero_) {
        PyObject* arguments[] = {sum.ptr(), gradient.ptr(), weight_.ptr()};
        checked(PyObject_VectorcallMethod(add_.ptr(), arguments, 2, alpha_.ptr()));
      }
      return py::make_tuple(py::none());
    }
    // A new tensor, for the gradient may be shared. Weight 0 replaces, since 0 · NaN is NaN.
    return py::make_tuple(is_zero_ ? zeros_like_(gradient) : gradient * weight_);
  }

 private:
  /// Ask for what a pass has in common; false when nobody is there any more to tell.
  bool begin(std::int64_t pass) {
    const py::object owner = owner_();
    if (owner.is_none()) {
      return false;
    }
    const py::int_ number(pass);
    weight_ = checked(PyObject_CallMethodOneArg(owner.ptr(), begin_pass_.ptr(), number.ptr()));
    const auto weight = py::cast<double>(weight_);
    is_one_ = weight == 1.0;
    is_zero_ = weight == 0.0;
    // Where autograd builds a graph of the gradients, it does not add them in place.
    adds_ = checked(PyObject_CallNoArgs(is_grad_enabled_.ptr())).is(py::handle(Py_False));
    reached_.clear();
    pass_ = pass;
    return true;
  }

  static py::object get(py::handle object, const py::object& name) {
    return checked(PyObject_GetAttr(object.ptr(), name.ptr()));
  }

  /// Whether autograd would do nothing but add this gradient to the sum.
  [[nodiscard]] bool is_added_in_place(py::handle parameter, const py::object& sum, py::handle gradient) const {
    return !sum.is_none() && get(sum, layout_).is(strided_) && get(gradient, layout_).is(strided_) &&
           PyObject_Not(get(parameter, hooks_).ptr()) == 1;
  }

  py::object owner_;  // a weak reference
  py::object current_pass_;
  py::object is_grad_enabled_;
  py::object strided_;
  py::object zeros_like_;
  py::object begin_pass_ = interned("begin_pass");
  py::object grad_ = interned("grad");
  py::object layout_ = interned("layout");
  py::object hooks_ = interned("_post_accumulate_grad_hooks");
  py::object add_ = interned("add_");
  py::object alpha_ = py::make_tuple(interned("alpha"));
  py::object weight_ = py::float_(1.0);
  std::int64_t pass_ = -1;
  bool is_one_ = true;
  bool is_zero_ = false;
  bool adds_ = false;
  std::vector<const PyObject*> reached_;
};

PyObject* apply(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 2) {
    PyErr_SetString(PyExc_TypeError, "apply() takes a parameter and a tuple of its gradient");
    return nullptr;
  }
  return call<PassWeight>(
      self, [arguments](PassWeight& weight) { return weight.apply(arguments[0], arguments[1]).release().ptr(); });
}

PyMethodDef fast_methods[] = {
    {"apply", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&apply)), METH_FASTCALL,
     "apply($self, parameter, gradients, /)\n--\n\nReturn what to accumulate; None: the gradient as it is."},
};

}  // namespace

void register_weight(py::module_& module) {
  py::class_<PassWeight> weight(module, "PassWeight");
  weight.def(py::init<const py::object&>(), py::arg("owner"))
      .def("forget", &PassWeight::forget)
      .def("unreached", &PassWeight::unreached, py::arg("parameters"));
  add_fast_methods(weight, fast_methods);
}
