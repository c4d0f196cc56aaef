# A fresh machine needs Python 3.11+ and make. What follows happens in .venv, unless it says otherwise.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TRACE ?=
# The CPU build, where the index has no other; of another one say which: make setup TORCH=...
TORCH ?= torch==2.13.0

# Tests start hundreds of interpreters: without its cache each compiles all modules again.
unexport PYTHONDONTWRITEBYTECODE

# The demonstration has an environment of its own, with no more than it runs: no torch, no tests.
DEMO_VENV := .venv-demo

# So does the fuzzer, whose releases lag behind Python's.
FUZZ_VENV := .venv-fuzz

# Real engines run in an environment of their own.
VLLM_VENV := .venv-vllm
LMCACHE_VENV := .venv-lmcache
SGLANG_VENV := .venv-sglang

# A release is built and checked by tools of its own.
DIST_VENV := .venv-dist

# Every Python that kvtier supports and this machine has, on the path or from pyenv.
MINORS := 3.11 3.12 3.13
PYTHONS ?= $(shell for minor in $(MINORS); do \
	for python in python$$minor $${PYENV_ROOT:-$$HOME/.pyenv}/versions/$$minor.*/bin/python; do \
		found=$$($$python -c 'import sys; print(sys.executable)' 2>/dev/null) && break; done; \
	if [ -n "$$found" ]; then echo $$found; else echo "left out: there is no python$$minor" >&2; fi; done)

PIP_INSTALL := -m pip install --quiet --disable-pip-version-check

# Tests run side by side, two for each core: many of them only wait. A worker that has none left
# takes some of another's.
WORKERS ?= $(shell expr $$(nproc) \* 2)
LAYERS := tests/unit/test_layers.py
SIDE_BY_SIDE := -n $(WORKERS) --maxprocesses 8 --dist worksteal --durations 12

# The site is built from the sources: nothing of kvtier is installed or imported.
DOCS_VENV := .venv-docs

SEEDS ?= 1000
SEED ?=


MINUTES ?= 60
TRIES ?= 3

.PHONY: help setup redis-server memcached prometheus kubectl mooncake azurite browser servers fuse test test-reader chaos reliability fuzz endurance search wheels dist compiled test-wheels test-install test-image test-pythons sanitize check format demo bench bench-backends \
	bench-interference bench-core bench-peers bench-scheduler bench-worker bench-vllm messages gpu-bundle soak docs clean setup-vllm test-vllm test-vllm-compiled test-kernel test-vllm-next demo-vllm \
	setup-lmcache test-lmcache setup-sglang test-sglang test-engines

help:
	@echo "make demo [TRACE=file.jsonl]  chats through host pool and file tier, in two processes; no torch"
	@echo "make test [WORKERS=N]         run every test, N at once"
	@echo "make chaos                    every fault of real servers and file systems, under load; as root"
	@echo "make reliability [TRIES=3]    the same several times, and write docs/reliability.md"
	@echo "make endurance                200,000 requests with a fault each second"
	@echo "make fuzz [MINUTES=60]        fuzz everything that reads what others wrote, and keep new inputs"
	@echo "make search                   property tests with thirty times as many examples, new ones each time"
	@echo "make test-reader              tutorial, examples, demo, alerts and typing, as their readers have them"
	@echo "make wheels                   the packages' wheels in dist/; core and file tier are compiled where there is a C compiler"
	@echo "make test-wheels              make wheels, and run tests against them (python tests/wheels.py --help)"
	@echo "make dist                     what a release publishes, in dist/: wheels for each Python, sources, SBOM, checksums"
	@echo "make test-install             install what make dist built where there is nothing but Python, for each Python"
	@echo "make test-image               build deploy/Containerfile on Debian without a registry, and start it; as root"
	@echo "make test-pythons             unit tests and kit on the other Pythons of this machine"
	@echo "make check                    ruff, mypy --strict, import layers"
	@echo "make docs                     docs/ and the API reference as a site, in site/"
	@echo "make soak [SEEDS=1000]        simulate that many seeds; SEED=7 plays one of them again"
	@echo "make bench [BENCH=...]        all benchmarks, written to docs/performance.md; BENCH=--quick tries it in 8 minutes"
	@echo "make bench-peers              set up what they compare with: vLLM, servers, clients; each where it can be"
	@echo "make bench-scheduler          time of the scheduler's thread per chunk"
	@echo "make bench-core               the same for the compiled core of make wheels, beside the pure one"
	@echo "make bench-backends           MB/s of each backend, beside plain clients and the limit"
	@echo "make bench-interference       an engine's steps beside each tier at work"
	@echo "make bench-worker             GB/s between device blocks and slots"
	@echo "make bench-vllm               first token from files in real engines, and damaged files: vLLM's tier beside ours"
	@echo "make messages                 write tests/integration/messages.txt: what mistakes and a healthy start print"
	@echo "make gpu-bundle [BUNDLE=dir]  one folder that checks the worker on a GPU without a network"
	@echo "make test-engines             all engines on the CPU: test-vllm, test-lmcache, test-sglang"
	@echo "make test-vllm                real vLLM engines on the CPU: environment and tests"
	@echo "make test-vllm-compiled       the same, with the compiled core of make wheels"
	@echo "make test-lmcache             LMCache's storage manager on the CPU: environment and tests"
	@echo "make test-sglang              SGLang's cache controller on the CPU: environment and tests"
	@echo "make sanitize                 the C code's tests under the address, undefined behaviour and thread sanitizers"
	@echo "make test-kernel              the kernel that gathers small pages, in triton's interpreter"
	@echo "make test-vllm-next           vLLM's next release, as far as it can be seen without its binary"
	@echo "make demo-vllm                an engine, and a second one that finds what the first stored"
	@echo "make format                   format the code"

# A wheel brings the coder of compressed chunks; in a clone tests and engines find it in its place.
CODER := kvtier_sdk/codecs/_planes.abi3.so

setup: $(VENV)/.setup $(CODER)

$(CODER): kvtier_sdk/codecs/_planes.c
	$(CC) -O3 -shared -fPIC -I$$($(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("include"))') $< -o $@

# The Redis tier is tested on real servers.
redis-server:
	@{ command -v redis-server && command -v redis-cli && command -v redis-benchmark; } >/dev/null \
		|| { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq redis-server; } \
		|| { echo "redis-server is missing and could not be installed: as root, apt-get install redis-server" >&2; exit 1; }

# Some faults are those of a file system in a process.
fuse:
	@ldconfig -p | grep -q libfuse3 \
		|| { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq fuse3; } \
		|| { echo "fuse3 is missing and could not be installed: as root, apt-get install fuse3" >&2; exit 1; }

# The example of a network tier too.
memcached:
	@command -v memcached >/dev/null \
		|| { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq memcached; } \
		|| { echo "memcached is missing and could not be installed: as root, apt-get install memcached" >&2; exit 1; }

# Alert rules are tested in a real Prometheus. The package is only unpacked: installed, it would start
# a service.
PROMETHEUS := .prometheus

prometheus:
	@command -v prometheus >/dev/null || [ -x $(PROMETHEUS)/usr/bin/prometheus ] \
		|| { apt-get update -qq && mkdir -p $(PROMETHEUS) && cd $(PROMETHEUS) \
			&& apt-get download -qq prometheus && dpkg -x prometheus_*.deb . && rm prometheus_*.deb; } \
		|| { echo "prometheus is missing and could not be downloaded: as root, apt-get install prometheus" >&2; exit 1; }

# The base for Kubernetes is rendered by its kustomize.
kubectl:
	@command -v kubectl >/dev/null || [ -x .kubectl/usr/bin/kubectl ] \
		|| { apt-get update -qq && mkdir -p .kubectl && cd .kubectl \
			&& apt-get download -qq kubernetes-client && dpkg -x kubernetes-client_*.deb . && rm kubernetes-client_*.deb; } \
		|| { echo "kubectl is missing and could not be downloaded: as root, apt-get install kubernetes-client" >&2; exit 1; }

# The wheel of the Mooncake tier's client brings its server, but not these libraries.
mooncake:
	@(for name in libibverbs libnuma libcurl; do ldconfig -p | grep -q "$$name\.so" || exit 1; done) \
		|| { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq libibverbs1 libnuma1 libcurl4; } \
		|| { echo "libraries are missing and could not be installed: as root, apt-get install libibverbs1 libnuma1 libcurl4" >&2; exit 1; }

# The page of a plan is opened in a browser.
browser:
	@command -v chromium-headless-shell >/dev/null || command -v chromium >/dev/null \
		|| { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium-headless-shell; } \
		|| echo "chromium cannot be installed: its test is skipped" >&2

# Everything that a test starts.
servers: redis-server memcached prometheus kubectl mooncake azurite browser

# Azure's emulator. Its tests are skipped where there is no npm.
azurite: .azurite/.setup
.azurite/.setup:
	@mkdir -p .azurite
	@npm install --prefix .azurite --no-audit --no-fund --silent azurite@3.35.0 \
		|| echo "azurite cannot be installed (it needs npm): its tests are skipped" >&2
	@touch $@

$(VENV)/.setup: pyproject.toml $(wildcard backends/*/pyproject.toml engines/*/pyproject.toml) requirements-dev.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP_INSTALL) --upgrade pip # a new pip resolves in a third of the time
	$(BIN)/python $(PIP_INSTALL) $(TORCH) -r requirements-dev.txt
	$(BIN)/python $(PIP_INSTALL) --no-build-isolation \
		-e '.[cli,events,metrics,seal,testing,torch,uvloop,yaml]' -e backends/file -e backends/redis \
		-e backends/s3 -e backends/obstore -e backends/mooncake -e engines/vllm -e engines/lmcache -e engines/sglang
	@touch $@

# On one event loop; test-wheels tests connections and backends on asyncio's. The layers are
# tested by make check.
test: setup servers
	KVTIER_TEST_LOOP=uvloop $(BIN)/python -m pytest $(SIDE_BY_SIDE) --ignore $(LAYERS)

# Tutorial, examples, template, benchmarks and demo, in environments as their readers have them; alerts and
# their page, the commands for operators, and an author's type check.
test-reader: setup servers
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) -m reader tests/integration

messages: setup redis-server
	KVTIER_WRITE_MESSAGES=1 $(BIN)/python -m pytest tests/integration/test_messages.py

chaos: setup redis-server fuse
	$(BIN)/python -m pytest -v -m "chaos or not chaos" tests/chaos

reliability: setup redis-server fuse
	PYTHONPATH=tests $(BIN)/python -m support.chaos --tries $(TRIES) docs/reliability.md

$(FUZZ_VENV)/.setup: pyproject.toml $(wildcard backends/*/pyproject.toml)
	$(PYTHON) -m venv $(FUZZ_VENV)
	$(FUZZ_VENV)/bin/python $(PIP_INSTALL) atheris -e '.[yaml]' -e backends/file -e backends/redis -e backends/s3
	@touch $@

fuzz: $(FUZZ_VENV)/.setup
	PYTHONPATH=tests nice -n 19 $(FUZZ_VENV)/bin/python -m support.fuzz --minutes $(MINUTES)

endurance: setup redis-server
	PYTHONPATH=tests $(BIN)/python -m support.endurance --requests 200000 --faults

search: setup servers
	HYPOTHESIS_PROFILE=search $(BIN)/python -m pytest $(SIDE_BY_SIDE) -m hypothesis

# A wheel of the core is compiled, for this Python and this kind of machine, if it is asked for.
COMPILED := $(if $(shell command -v $(CC)),HATCH_BUILD_HOOK_ENABLE_CUSTOM=1)

wheels: setup
	@$(if $(COMPILED),,echo "There is no C compiler ($(CC)): the core's wheel is pure Python")
	@rm -f dist/*.whl dist/SHA256SUMS
	@$(COMPILED) $(BIN)/python -m build --wheel --no-isolation --outdir dist .
	@for package in backends/*/ engines/*/; do \
		$(COMPILED) $(BIN)/python -m build --wheel --no-isolation --outdir dist $$package || exit 1; done

$(DIST_VENV)/.setup: requirements-dist.txt
	$(PYTHON) -m venv $(DIST_VENV)
	$(DIST_VENV)/bin/python $(PIP_INSTALL) --no-compile -r requirements-dist.txt
	@touch $@

# Compilation takes a minute for each Python.
COMPILED_FOR ?= $(PYTHONS)

# "make wheels" removes the checksums, because it replaces the wheels.
SOURCES = $(shell find kvtier_sdk backends/*/kvtier_* engines/*/kvtier_* -name '*.py' -o -name '*.c') \
	hatch_build.py backends/file/hatch_build.py $(wildcard pyproject.toml */*/pyproject.toml)

dist: dist/SHA256SUMS
dist/SHA256SUMS: $(DIST_VENV)/.setup scripts/dist.py $(SOURCES)
	$(DIST_VENV)/bin/python scripts/dist.py $(COMPILED_FOR)

# What the wheels have compiled, for programs that find it on the path before the checkout.
compiled: wheels
	@rm -rf build/compiled
	@$(BIN)/python $(PIP_INSTALL) --no-deps --no-compile \
		--target build/compiled dist/kvtier_sdk-*.whl dist/kvtier_file-*.whl

# The preloaded library must be the first, because the interpreter itself is not instrumented.
sanitize: setup
	@for pair in libasan:address libubsan:undefined libtsan:thread; do \
		library=$${pair%:*} kind=$${pair#*:}; echo "$$kind sanitizer"; \
		LD_PRELOAD=$$($(CC) -print-file-name=$$library.so) CFLAGS="-g -fsanitize=$$kind" \
		ASAN_OPTIONS=detect_leaks=0 TSAN_OPTIONS=report_signal_unsafe=0 \
		$(BIN)/python -m pytest -q -s -p no:cacheprovider backends/file/tests/test_file_compiled.py \
			backends/file/tests/test_file_spares.py backends/file/tests/test_file_capacity.py \
			tests/unit/codecs/test_planes.py || exit 1; \
	done

test-wheels: wheels servers
	$(BIN)/python tests/wheels.py $(SIDE_BY_SIDE)

test-install: dist
	$(PYTHON) tests/install.py $(PYTHONS)

# As root; debootstrap takes minutes.
test-image: dist
	@{ command -v buildah && command -v debootstrap; } >/dev/null \
		|| { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends buildah crun debootstrap; }
	$(BIN)/python tests/image.py

# The Pythons are tested side by side, because the tests only wait for a third of their time.
test-pythons: setup dist
	@pids=; for python in $(PYTHONS); do \
		[ "$$($$python -V)" = "$$($(BIN)/python -V)" ] && continue; \
		$(BIN)/python tests/wheels.py --python $$python $(SIDE_BY_SIDE) & pids="$$pids $$!"; \
	done; failed=; for pid in $$pids; do wait $$pid || failed=1; done; [ -z "$$failed" ]

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest $(LAYERS)

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

$(DEMO_VENV)/.setup: pyproject.toml backends/file/pyproject.toml
	@echo "Making an environment in $(DEMO_VENV)"
	@$(PYTHON) -m venv $(DEMO_VENV)
	@echo "Installing kvtier-sdk, kvtier-file and what they need into it: about 25 MB, no torch"
	@$(DEMO_VENV)/bin/python $(PIP_INSTALL) --no-compile -e '.[cli]' -e backends/file
	@touch $@

demo: $(DEMO_VENV)/.setup
	@$(DEMO_VENV)/bin/python examples/demo.py $(TRACE)

bench: compiled
	PYTHONPATH=$(CURDIR)/build/compiled $(BIN)/python benchmarks/report.py $(if $(TRACE),--trace $(TRACE)) $(BENCH)

# Each is optional: a benchmark leaves out what is missing, and its column says so.
bench-peers: setup
	@for peer in redis-server mooncake setup-vllm setup-lmcache setup-sglang; do \
		$(MAKE) --no-print-directory $$peer >/dev/null || missing="$$missing $$peer"; \
	done; \
	if [ -z "$$missing" ]; then echo "all peers are set up: make bench"; \
	else echo "missing, and left out by make bench:$$missing (make NAME says why)"; fi

bench-scheduler: setup
	$(BIN)/python benchmarks/scheduler.py $(TRACE)

bench-core: wheels
	$(BIN)/python benchmarks/versions.py . $$(ls dist/kvtier_sdk-*-cp*.whl) \
		scheduler.py $(TRACE) --cost-only --rounds 1 --concurrency 8

bench-backends: compiled redis-server mooncake
	PYTHONPATH=$(CURDIR)/build/compiled $(BIN)/python benchmarks/backends.py $(BENCH)

bench-interference: setup redis-server
	$(BIN)/python benchmarks/interference.py $(BENCH)

bench-worker: setup
	$(BIN)/python benchmarks/worker.py $(BENCH)

gpu-bundle: setup
	$(BIN)/python scripts/gpu_bundle.py $(BUNDLE)

# An engine computes with one thread, so there is one for each core.
ENGINES := -n $(shell nproc) --maxprocesses 4 --dist worksteal
VLLM_TESTS := engines/vllm/tests/engine
# This test keeps every core busy, so it runs alone, after the others.
VLLM_BUSY := $(VLLM_TESTS)/test_busy_machine.py
VLLM_PYTEST := $(VLLM_VENV)/bin/python -P -m pytest

setup-vllm: $(CODER)
	$(PYTHON) scripts/vllm_environment.py $(VLLM_VENV)

test-vllm: setup-vllm redis-server memcached mooncake
	$(VLLM_PYTEST) $(VLLM_TESTS) $(ENGINES) --ignore $(VLLM_BUSY)
	$(VLLM_PYTEST) $(VLLM_BUSY)

# -P: the wheel's core, not the checkout's.
test-vllm-compiled: setup-vllm compiled redis-server memcached mooncake
	PYTHONPATH=build/compiled $(VLLM_VENV)/bin/python -P -m kvtier_sdk.cli --version
	PYTHONPATH=build/compiled $(VLLM_PYTEST) $(VLLM_TESTS) $(ENGINES) --ignore $(VLLM_BUSY)
	PYTHONPATH=build/compiled $(VLLM_PYTEST) $(VLLM_BUSY)

setup-lmcache: $(CODER)
	$(PYTHON) scripts/lmcache_environment.py $(LMCACHE_VENV)

test-lmcache: setup-lmcache redis-server memcached
	$(LMCACHE_VENV)/bin/python -m pytest engines/lmcache/tests/engine $(ENGINES)

setup-sglang: $(CODER)
	$(PYTHON) scripts/sglang_environment.py $(SGLANG_VENV)

test-sglang: setup-sglang redis-server memcached
	$(SGLANG_VENV)/bin/python -m pytest engines/sglang/tests/engine $(ENGINES)

test-engines: test-vllm test-lmcache test-sglang

# triton is large, and vLLM has brought it.
test-kernel: setup-vllm
	$(VLLM_VENV)/bin/python -m pytest tests/unit/worker/test_gather.py tests/unit/worker/test_kernel.py

test-vllm-next: setup-vllm
	$(PYTHON) scripts/vllm_next.py $(VLLM_VENV)

bench-vllm: setup-vllm
	$(VLLM_VENV)/bin/python benchmarks/first_token.py $(BENCH)

demo-vllm: setup-vllm
	$(VLLM_VENV)/bin/python examples/demo_vllm.py

soak: setup
	PYTHONPATH=tests $(BIN)/python -m support.simulation $(if $(SEED),--seed $(SEED),--seeds $(SEEDS))

$(DOCS_VENV)/.setup: requirements-docs.txt
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python $(PIP_INSTALL) --no-compile -r requirements-docs.txt
	@touch $@

# A broken link, an unresolved reference or a page without its place in the navigation is an error.
docs: $(DOCS_VENV)/.setup
	PATH="$(CURDIR)/$(DOCS_VENV)/bin:$$PATH" NO_MKDOCS_2_WARNING=1 mkdocs build --strict

clean:
	rm -rf $(CODER) $(VENV) $(DEMO_VENV) $(DIST_VENV) $(VLLM_VENV) $(LMCACHE_VENV) $(SGLANG_VENV) $(DOCS_VENV) $(FUZZ_VENV) $(PROMETHEUS) .kubectl site .mypy_cache .pytest_cache .ruff_cache .hypothesis
