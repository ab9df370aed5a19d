#!/usr/bin/env bash
# Builds and runs the C++ tests: test_cpp.sh FOLDER SANITIZERS
set -euo pipefail
cd "$(dirname "$0")/.."

mkdir -p build
.venv/bin/cmake -S . -B "$1" -G Ninja -DCMAKE_BUILD_TYPE=Debug -DCHRONICA_PYTHON=OFF -DCHRONICA_TESTS=ON \
  -DCHRONICA_SANITIZE="$2" -DCHRONICA_WERROR=ON -DCMAKE_MAKE_PROGRAM="$PWD/.venv/bin/ninja" >"$1.log" || (cat "$1.log"; exit 1)
.venv/bin/cmake --build "$1"
.venv/bin/ctest --test-dir "$1" --output-on-failure
