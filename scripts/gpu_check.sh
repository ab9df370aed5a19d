#!/usr/bin/env bash
# Checks the timing on a machine with an NVIDIA GPU, in at most five minutes and without a network: builds the package
# into a temporary folder, runs the blocks of bench/gpu_check, and writes bench/results/gpu.json.
#   --help lists the options; PYTHON is the Python that has torch (default: python3).
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)

fail() {
  echo "gpu_check: $1" >&2
  exit 1
}

python=${PYTHON:-python3}
command -v "$python" >/dev/null || fail "$python is not on PATH; set PYTHON to the Python that has torch"
command -v "${CXX:-c++}" >/dev/null || fail "no C++ compiler: ${CXX:-c++} is not on PATH; install g++ 11 or clang++ 14, or set CXX"
command -v readelf >/dev/null || fail "readelf is not on PATH; install binutils"

# Nothing is imported from the folder that this is called in (from Python 3.11 on).
export PYTHONSAFEPATH=1 PYTHONPATH=$root/bench${PYTHONPATH:+:$PYTHONPATH}

# What the build looks for, by its own search.
missing=$("$python" - <<'PYTHON'
import importlib.util
import shutil

missing = [name for name in ("torch", "numpy", "pip", "pybind11", "scikit_build_core") if not importlib.util.find_spec(name)]
if "scikit_build_core" not in missing:
    from packaging.specifiers import SpecifierSet
    from scikit_build_core.program_search import best_program, get_cmake_programs, get_ninja_programs

    if best_program(get_cmake_programs(), version=SpecifierSet(">=3.24")) is None:
        missing.append("cmake>=3.24")
    if best_program(get_ninja_programs(), version=None) is None and shutil.which("make") is None:
        missing.append("ninja or make")
print(*missing, sep=", ")
PYTHON
)
[ -z "$missing" ] || fail "for $(command -v "$python") is missing: $missing; install it, or set PYTHON to a Python that has it"

exec "$python" -m gpu_check "$@"
