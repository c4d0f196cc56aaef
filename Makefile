# A fresh machine needs Python 3.11+ and make. What follows happens in .venv, unless it says otherwise.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TRACE ?=
# The CPU build, where the index has no other; of another one say which: make setup TORCH=...
TORCH ?= torch==2.13.0

# The demonstration has an environment of its own, with no more than it runs: no torch, no tests.
DEMO_VENV := .venv-demo

# Real engines run in an environment of their own.
VLLM_VENV := .venv-vllm

# Tests run side by side, one more than there are cores: many of them only wait. A worker that has
# none left takes some of another's.
WORKERS ?= $(shell expr $$(nproc) + 1)
SIDE_BY_SIDE := -n $(WORKERS) --maxprocesses 8 --dist worksteal --durations 12

SEEDS ?= 1000
SEED ?=

REQUESTS ?= 4000

.PHONY: help setup redis-server memcached test search test-trace test-wheels check format demo bench bench-backends \
	bench-interference bench-worker gpu-bundle soak clean setup-vllm test-vllm test-vllm-next demo-vllm

help:
	@echo "make demo [TRACE=file.jsonl]  chats through host pool and file tier, in two processes; no torch"
	@echo "make test [WORKERS=N]         run every test, N at once"
	@echo "make search                   property tests with ten times as many examples, new ones each time"
	@echo "make test-trace [TRACE=file]  a trace through all tiers at once: 4,000 requests of it"
	@echo "make test-wheels              build the wheels, and run tests against them (python tests/wheels.py --help)"
	@echo "make check                    ruff, mypy --strict, import layers"
	@echo "make soak [SEEDS=1000]        simulate that many seeds; SEED=7 plays one of them again"
	@echo "make bench                    time of the scheduler's thread per chunk"
	@echo "make bench-backends           MB/s of each backend, beside plain clients and the limit"
	@echo "make bench-interference       an engine's steps beside each tier at work"
	@echo "make bench-worker             GB/s between device blocks and slots"
	@echo "make gpu-bundle [BUNDLE=dir]  one folder that checks the worker on a GPU without a network"
	@echo "make test-vllm                real vLLM engines on the CPU: environment and tests"
	@echo "make test-vllm-next           vLLM's next release, as far as it can be seen without its binary"
	@echo "make demo-vllm                an engine, and a second one that finds what the first stored"
	@echo "make format                   format the code"

setup: $(VENV)/.setup

# The Redis tier is tested on real servers.
redis-server:
	@{ command -v redis-server && command -v redis-cli && command -v redis-benchmark; } >/dev/null \
		|| { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq redis-server; } \
		|| { echo "redis-server is missing and could not be installed: as root, apt-get install redis-server" >&2; exit 1; }

# The example of a network tier too.
memcached:
	@command -v memcached >/dev/null \
		|| { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq memcached; } \
		|| { echo "memcached is missing and could not be installed: as root, apt-get install memcached" >&2; exit 1; }

$(VENV)/.setup: pyproject.toml $(wildcard backends/*/pyproject.toml) requirements-dev.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH) \
		-r requirements-dev.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
		-e '.[cli,seal,testing,torch,uvloop,yaml]' -e backends/file -e backends/redis \
		-e backends/s3
	@touch $@

test: setup redis-server memcached
	$(BIN)/python -m pytest $(SIDE_BY_SIDE)

search: setup redis-server memcached
	HYPOTHESIS_PROFILE=search $(BIN)/python -m pytest $(SIDE_BY_SIDE) -m hypothesis

# Without TRACE: one that lies beside the project, or generated chats.
test-trace: setup redis-server
	$(if $(TRACE),KVTIER_TRACE=$(TRACE)) KVTIER_TRACE_REQUESTS=$(REQUESTS) \
		$(BIN)/python -m pytest -v --capture=no tests/integration/test_three_tiers.py

test-wheels: setup redis-server
	$(BIN)/python tests/wheels.py $(SIDE_BY_SIDE)

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/unit/test_layers.py

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

$(DEMO_VENV)/.setup: pyproject.toml backends/file/pyproject.toml
	@echo "Making an environment in $(DEMO_VENV)"
	@$(PYTHON) -m venv $(DEMO_VENV)
	@echo "Installing kvtier-sdk, kvtier-file and what they need into it: about 25 MB, no torch"
	@$(DEMO_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile \
		-e '.[cli]' -e backends/file
	@touch $@

demo: $(DEMO_VENV)/.setup
	@$(DEMO_VENV)/bin/python examples/demo.py $(TRACE)

bench: setup
	$(BIN)/python benchmarks/scheduler.py $(TRACE)

bench-backends: setup redis-server
	$(BIN)/python benchmarks/backends.py $(BENCH)

bench-interference: setup redis-server
	$(BIN)/python benchmarks/interference.py $(BENCH)

bench-worker: setup
	$(BIN)/python benchmarks/worker.py $(BENCH)

gpu-bundle: setup
	$(BIN)/python scripts/gpu_bundle.py $(BUNDLE)

setup-vllm:
	$(PYTHON) scripts/vllm_environment.py $(VLLM_VENV)

test-vllm: setup-vllm redis-server
	$(VLLM_VENV)/bin/python -m pytest tests/engines/vllm

test-vllm-next: setup-vllm
	$(PYTHON) scripts/vllm_next.py $(VLLM_VENV)

demo-vllm: setup-vllm
	$(VLLM_VENV)/bin/python examples/demo_vllm.py

soak: setup
	PYTHONPATH=tests $(BIN)/python -m support.simulation $(if $(SEED),--seed $(SEED),--seeds $(SEEDS))

clean:
	rm -rf $(VENV) $(DEMO_VENV) $(VLLM_VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis
