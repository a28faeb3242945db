# Needs make and Python 3.11 or newer; everything else goes into $(VENV) on first use.
VENV ?= .venv
# A pyenv shim exists for versions that are not active, so each candidate has to run before it counts.
PYTHON ?= $(shell for python in python3.13 python3.12 python3.11 python3; do \
	$$python -c 'import sys, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 \
	&& { command -v $$python; break; }; done)

# Newer releases of a package may have left the oldest Python behind, so the versions are chosen there.
OLDEST_PYTHON ?= python3.11
# Named exactly: where an index has builds for several accelerators, an open range may take one of gigabytes.
TORCH ?= $(shell grep '^torch==' constraints.txt)

# Tests start hundreds of programs, and each would compile every module that it imports.
unexport PYTHONDONTWRITEBYTECODE

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
CHECKOV := build/k8s/bin/checkov
TRITON_HOME := build/triton$(addprefix -,$(TRITON_VERSION))
TRITON := $(TRITON_HOME)/.installed
SLOW := chaos or browser or peers
# What `python -m qualification` runs, and what measures.
ELSEWHERE := bench or gpu or live or grid
# Tests wait for other processes now and then; each worker takes a dozen seconds to collect them.
WORKERS ?= $(shell echo $$(( 2 * $$(getconf _NPROCESSORS_ONLN) )))
# Of these tests more compute, and what is late is a failure.
SLOW_WORKERS ?= $(shell echo $$(( 3 * $$(getconf _NPROCESSORS_ONLN) / 2 )))
# Files of some minutes are begun first, so that no worker ends long after the others.
LONG := tests/chaos/test_kv_tiers.py tests/docs/test_walks.py tests/fleet/test_up.py tests/fleet/test_on_ray.py \
	tests/k8s/test_drain.py tests/replica/test_native.py tests/chaos/test_schema.py
# What waits for Ray and for a few requests disturbs nobody, and what others do beside it hardly matters to it. The long
# ones come first.
PATIENT := tests/chaos/test_fleet_nodes.py tests/hostile/test_ray.py tests/hostile/test_other_users.py \
	tests/hostile/test_silence.py tests/hostile/test_connections.py tests/chaos/test_fleet_rolling.py $(addprefix tests/chaos/test_, \
	router_picker.py shadow.py router_engines.py)
# These look at the clock, and want the machine for themselves; the calm ones come first.
CLOCKED := $(addprefix tests/chaos/test_,replica_kill.py router_failure.py replica_load.py stream_chaos.py) \
	tests/hostile/test_large_bodies.py
# Each worker imports all that the files which it reads import, which takes seconds. So files are chosen by what they say;
# tests/test_layout.py demands that each test is found so.
# The router's tests wait most, so they come first: at the end, every worker has something to compute.
FAST := tests/router $(filter-out tests/router tests/browser tests/chaos tests/__pycache__,$(patsubst %/,%,$(wildcard tests/*/))) \
	$(wildcard tests/test_*.py) qualification -m "not ($(SLOW) or $(ELSEWHERE))"
SLOW_FILES = tests/browser $(shell grep -lrE 'mark\.(chaos|peers)' tests --include 'test_*.py')
SLOWEST := --durations 15 --durations-min 4 -m "($(SLOW)) and not ($(ELSEWHERE))"
PROPERTIES = -m "hypothesis and not ($(SLOW) or $(ELSEWHERE))" $(shell grep -lr hypothesis tests --include 'test_*.py')

.DEFAULT_GOAL := help
.PHONY: help up test coverage test-slow test-busy test-patient test-clocked test-thorough search test-all qualify lint \
	fmt types k8s-check k8s-scan triton-check environment tools collect kubectl bench gpu-kit lock clean

help:  ## show these targets
	@sed -n 's/^\([a-z0-9-]*\):.*## \(.*\)/\1|\2/p' $(firstword $(MAKEFILE_LIST)) | awk -F'|' '{printf "make %-12s %s\n", $$1, $$2}'

up: $(INSTALLED)  ## start two replicas of smollm2, a small model, on Ray, and a router that speaks the OpenAI API; make up ARGS="--replicas 4"
	$(BIN)/warmroute up $(ARGS)

test: $(INSTALLED)  ## run the fast tests
	$(BIN)/pytest -n $(WORKERS) --dist worksteal $(FAST)

coverage: $(INSTALLED)  ## run the fast tests with coverage, which takes nearly twice as long
	$(BIN)/pytest -n auto $(FAST) --cov --cov-report=term

test-slow: test-clocked test-patient test-busy  ## run the slow tests only: real processes, browsers, other projects' peers

test-clocked: $(INSTALLED)
	$(BIN)/pytest $(SLOWEST) $(CLOCKED)

test-patient: $(INSTALLED)
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder --timeout 180 $(SLOWEST) $(PATIENT)

test-busy: $(INSTALLED)
	$(BIN)/pytest -n $(SLOW_WORKERS) --dist loadfile --no-loadscope-reorder --timeout 180 $(SLOWEST) \
		$(LONG) $(filter-out $(PATIENT) $(CLOCKED) $(LONG),$(SLOW_FILES))

collect: $(INSTALLED)
	$(BIN)/pytest -q --collect-only >/dev/null

test-thorough: $(INSTALLED)
	$(BIN)/pytest -n auto --timeout 600 --hypothesis-profile=thorough $(PROPERTIES)

qualify: $(INSTALLED)  ## run what changes rarely or needs what is not ours: engines, clients, images, whole grids; hours
	$(BIN)/python -m qualification

SECONDS ?= 600

search: $(INSTALLED)  ## run the property tests and whole worlds on examples nobody has tried; what fails is kept or named
	$(BIN)/pytest -n auto --timeout 6000 --hypothesis-profile=search $(PROPERTIES)
	$(BIN)/python -m tests.world --seconds $(SECONDS)

test-all: test test-slow  ## run the fast and the slow tests

lint: $(INSTALLED)  ## check style and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

fmt: $(INSTALLED)  ## repair style and formatting where that is safe
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(INSTALLED)  ## check types
	$(BIN)/mypy

k8s-check: k8s-scan  ## check the manifests of k8s/: schemas, names, network policies, a security scan
	$(BIN)/pytest -q -n auto -m "not ($(SLOW) or $(ELSEWHERE))" tests/k8s

k8s-scan: kubectl $(INSTALLED) $(CHECKOV)
	$(BIN)/python -m tests.k8s.scan $(CHECKOV)

kubectl:
	@command -v kubectl >/dev/null || { echo "there is no kubectl here, which renders k8s/; install one of version 1.32 or newer: kubernetes.io/docs/tasks/tools" >&2; exit 1; }

$(CHECKOV): tests/k8s/requirements.txt
	$(call need_python)
	test -x build/k8s/bin/python || $(PYTHON) -m venv build/k8s
	build/k8s/bin/pip install -q --no-compile -r tests/k8s/requirements.txt
	@touch $@

# Empty: all of them.
CASES = -m "not grid"

triton-check: $(TRITON) $(INSTALLED)  ## check the GPU's kernels without a GPU: interpreted, and compiled ahead of time; also CASES= TRITON_VERSION=3.6.0
	TRITON_INTERPRET=1 $(PYTEST_TRITON) $(CASES) tests/kernels/gpu
	$(PYTEST_TRITON) $(CASES) tests/kernels/gpu

PYTEST_TRITON := OMP_NUM_THREADS=1 TRITON_CACHE_DIR=$(TRITON_HOME)/cache PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 \
	$(TRITON_HOME)/bin/python -m pytest -q -n 2 -c tests/kernels/gpu/triton.ini --rootdir . --confcutdir tests/kernels/gpu

# A .pth file adds the other environment's packages, torch among them, behind its own.
$(TRITON): tests/kernels/gpu/requirements.txt | $(BIN)/python
	$(BIN)/python -m venv --clear $(TRITON_HOME)
	$(TRITON_HOME)/bin/pip install -q --no-compile -r tests/kernels/gpu/requirements.txt
	$(if $(TRITON_VERSION),$(TRITON_HOME)/bin/pip install -q --no-compile triton==$(TRITON_VERSION))
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		> $$($(TRITON_HOME)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/behind.pth
	@touch $@

bench: $(INSTALLED)  ## measure, and print a table
	$(BIN)/python -m tests.bench

gpu-kit:  ## pack the check for a GPU into one file, build/warmroute-gpu-kit.pyz, that needs no registry where it runs
	$(call need_python)
	$(PYTHON) -m tests.gpu.kit

lock:  ## write constraints.txt anew: the newest versions that fit with its torch, on the oldest Python
	rm -rf build/lock
	$(OLDEST_PYTHON) -m venv build/lock
	build/lock/bin/pip install -q '$(TORCH)' '.[dev,kuberay,ray,replica]'
	{ sed -n '/^#/p' constraints.txt; build/lock/bin/pip freeze --all --exclude pip --exclude warmroute | sed 's/+cpu$$//'; } \
		> build/constraints.txt
	mv build/constraints.txt constraints.txt
	rm -rf build/lock

clean:  ## remove everything that make and the tests have built
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage .coverage.* htmlcov
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

environment: $(INSTALLED)

# What only the checks need, each in an environment of its own.
tools: $(CHECKOV) $(TRITON)

# pip would compile on one processor, and also half of it that is never imported here. Some files are templates, no Python.
NEVER_IMPORTED := /(ray/(data|llm|rllib|serve|train|tune)|torch/(_dynamo|_inductor|onnx|testing)|transformers/models|networkx|pip|setuptools|sympy)/

$(BIN)/python:
	$(call need_python)
	$(PYTHON) -m venv $(VENV)

$(INSTALLED): pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/pip install -q --no-compile -c constraints.txt -e '.[dev,ray,replica]'
	$(BIN)/python -m compileall -qq -j 0 -x '$(NEVER_IMPORTED)' $(VENV)/lib || true
	@touch $@

define need_python
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or newer with venv was found; install one, or name it: make PYTHON=/path/to/python3" >&2; exit 1; }
endef
