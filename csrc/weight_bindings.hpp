#pragma once

#include <pybind11/pybind11.h>

/// `PassWeight`: what is done to every gradient.
void register_weight(pybind11::module_& module);
