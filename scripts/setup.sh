#!/usr/bin/env bash
# Everything that `make demo` and `make test` need, into .venv: pinned packages, the extension, Horovod.
# What is up to date already takes no time.
set -euo pipefail
cd "$(dirname "$0")/.."

fail() {
  echo "setup: $1" >&2
  exit 1
}

python=${PYTHON:-python3}
command -v "$python" >/dev/null || fail "$python is not on PATH; install Python 3.10 or newer, or set PYTHON to yours"
"$python" -V >/dev/null 2>&1 || fail "$python does not run; set PYTHON to a Python 3.10 or newer"
"$python" -c 'import sys; raise SystemExit(sys.version_info < (3, 10))' ||
  fail "Python 3.10 or newer is needed, $python is $("$python" -V 2>&1); set PYTHON to a newer one"
command -v "${CXX:-c++}" >/dev/null || fail "no C++ compiler: ${CXX:-c++} is not on PATH; install g++ 11 or clang++ 14, or set CXX"
command -v make >/dev/null || fail "make is not on PATH; Horovod's build needs it"

# A stamp holds the hash of what it was made from, so a changed file or an interrupted run makes it again.
stamp_of() { cat "$@" | cksum; }
is_current() { [ -f "$1" ] && [ "$(cat "$1")" = "$2" ]; }

packages=$(stamp_of requirements-dev.txt)
if ! is_current .venv/packages.stamp "$packages"; then
  echo "setup: installing the pinned packages into .venv"
  .venv/bin/python -m pip --version >/dev/null 2>&1 || "$python" -m venv --clear .venv
  .venv/bin/python -m pip install --quiet --disable-pip-version-check --requirement requirements-dev.txt
  echo "$packages" >.venv/packages.stamp
fi

sources=$(stamp_of pyproject.toml CMakeLists.txt csrc/*)
if ! is_current .venv/extension.stamp "$sources"; then
  echo "setup: building the extension"
  .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps --editable . \
    --config-settings build-dir=build/extension --config-settings cmake.define.CHRONICA_WERROR="${CI:+ON}"
  echo "$sources" >.venv/extension.stamp
fi

horovod=$(stamp_of requirements-dev.txt chronica_hvd/horovod_build.py)
if ! is_current .venv/horovod.stamp "$horovod"; then
  echo "setup: installing Horovod"
  .venv/bin/chronica-hvd build-horovod
  echo "$horovod" >.venv/horovod.stamp
fi
