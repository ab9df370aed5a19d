#pragma once

#include <pybind11/pybind11.h>

/// Add the type `StepTimer` and what belongs to it.
void register_timer(pybind11::module_& module);
