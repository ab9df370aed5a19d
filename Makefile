# One command per task; each does its own set-up.
.PHONY: setup demo bench-plan bench-timer bench-feedback test test-python test-cpp lint format clean

setup:
	@bash scripts/setup.sh

demo: setup
	@.venv/bin/python bench/demo.py

# Beside FlatFlow, which needs nothing that .venv does not have.
bench-plan: setup
	@.venv/bin/python -m pip install --quiet --disable-pip-version-check --requirement bench/requirements.txt
	@.venv/bin/python bench/bench_plan.py

# What we cost: the timer, our own time in a step, whole steps beside plain Horovod.
bench-timer: setup
	@.venv/bin/python bench/bench_timer.py

# What following measured times is worth: a slow rank relieved, costs by size, FLOPs and time.
bench-feedback: setup
	@.venv/bin/python bench/bench_feedback.py

test: test-cpp test-python

test-python: setup
	.venv/bin/python -m pytest

# Under address and undefined-behaviour sanitizers; what threads share under ThreadSanitizer too.
test-cpp: setup
	@bash scripts/test_cpp.sh build/cpp address,undefined
	@bash scripts/test_cpp.sh build/cpp-thread thread

lint: setup
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/clang-format --dry-run --Werror csrc/*.?pp tests/cpp/*.?pp

format: setup
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .
	.venv/bin/clang-format -i csrc/*.?pp tests/cpp/*.?pp

clean:
	rm -rf build .venv
