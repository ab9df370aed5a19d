#pragma once

#include <pybind11/pybind11.h>

#include <exception>
#include <span>

/// For methods that are called so often that pybind11's own dispatch, which takes several times what they do, is too
/// slow: plain functions of the interpreter's C interface on a class that pybind11 has made.

/// A new reference that may be null for an error, which is then thrown.
inline pybind11::object checked(PyObject* object) {
  if (object == nullptr) {
    throw pybind11::error_already_set();
  }
  return pybind11::reinterpret_steal<pybind11::object>(object);
}

/// A name, made once.
inline pybind11::object interned(const char* name) { return checked(PyUnicode_InternFromString(name)); }

/// The C++ object inside a Python object that is known to hold one; null, with an error set, before __init__ has run.
template <class Object>
Object* object_in(PyObject* self) {
  auto* instance = reinterpret_cast<pybind11::detail::instance*>(self);
  auto* object = static_cast<Object*>(instance->get_value_and_holder().value_ptr());
  if (object == nullptr) {
    PyErr_Format(PyExc_RuntimeError, "%s.__init__() was not called", Py_TYPE(self)->tp_name);
  }
  return object;
}

/// Do something with that object for the interpreter, which takes no C++ exceptions.
template <class Object, class Action>
PyObject* call(PyObject* self, Action action) {
  auto* object = object_in<Object>(self);
  if (object == nullptr) {
    return nullptr;
  }
  try {
    return action(*object);
  } catch (pybind11::error_already_set& error) {
    error.restore();
  } catch (const pybind11::builtin_exception& error) {
    error.set_error();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

inline void add_fast_methods(pybind11::object& type, std::span<PyMethodDef> methods) {
  for (PyMethodDef& method : methods) {
    type.attr(method.ml_name) = pybind11::reinterpret_steal<pybind11::object>(
        PyDescr_NewMethod(reinterpret_cast<PyTypeObject*>(type.ptr()), &method));
  }
}
