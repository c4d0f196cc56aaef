# Everything happens in .venv; a fresh machine needs Python 3.11+ and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TRACE ?=

.PHONY: help setup test test-wheels check format demo bench clean

help:
	@echo "make demo [TRACE=file.jsonl]  play a workload through host pool and file tier, twice"
	@echo "make test                     run every test"
	@echo "make test-wheels              build the wheels, and run tests against them (python tests/wheels.py --help)"
	@echo "make check                    ruff, mypy --strict, import layers"
	@echo "make bench                    time of the scheduler's thread per chunk"
	@echo "make format                   format the code"

setup: $(VENV)/.setup

$(VENV)/.setup: pyproject.toml backends/file/pyproject.toml requirements-dev.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
		-e '.[cli,testing,uvloop,yaml]' -e backends/file
	@touch $@

test: setup
	$(BIN)/python -m pytest

test-wheels: setup
	$(BIN)/python tests/wheels.py

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/unit/test_layers.py

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

demo: setup
	$(BIN)/python examples/demo.py $(TRACE)

bench: setup
	$(BIN)/python tests/bench/scheduler.py $(TRACE)

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis
