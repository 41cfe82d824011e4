# Everything that this repository can do, by name. `make help` lists it.
#
# Only Python >= 3.11 (with venv) and make have to be there. The environment is .venv;
# stamp files in it say what is installed, so that nothing is installed twice.

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
SHELL := /bin/bash

VENV := .venv
BIN := $(VENV)/bin
PYTEST_ARGS ?=

# Tests run in two processes; more cores: make WORKERS=8 test. Those marked `cluster` wait for servers and ranks most of the
# time, so more of them run side by side.
WORKERS ?= 2
RUN_TESTS := $(BIN)/python scripts/run_tests.py --workers $(WORKERS)

# The first interpreter that really runs and is new enough; `make PYTHON=/path/to/python setup` overrides.
PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3 python; do \
	$$python -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)

.PHONY: help
help: ## This list.
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-20s %s\n", $$1, $$2}'

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer (with venv) was not found: apt-get install python3.11-venv, or make PYTHON=/path/to/python setup" >&2; exit 1; }
	@echo "creating $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV) || { echo "venv failed: apt-get install python3-venv" >&2; rm -rf $(VENV); exit 1; }

# What the examples need: the runtime dependencies.
$(VENV)/.stamp-run: $(BIN)/python pyproject.toml
	@echo "installing Shardwright and what it needs into $(VENV) (half a minute to a minute)"
	@$(BIN)/python scripts/install.py .
	@touch $@

# What tests and checks need on top.
$(VENV)/.stamp-dev: $(VENV)/.stamp-run
	@echo "installing what tests and checks need"
	@$(BIN)/python scripts/install.py '.[dev]'
	@touch $@

.PHONY: setup
setup: $(VENV)/.stamp-dev ## Make .venv with everything for use and development.
	@echo "ready: $(BIN)/shardwright --help"

.PHONY: quickstart
quickstart: $(VENV)/.stamp-run ## Train a small GPT-2 on 8 CPU devices and print its plan (under 5 minutes).
	@$(BIN)/python examples/gpt2/train.py --explain

.PHONY: test
test: $(VENV)/.stamp-dev ## Run the tests that take seconds (under 10 minutes on two cores).
	@$(RUN_TESTS) quick -- $(PYTEST_ARGS)

.PHONY: test-all
test-all: $(VENV)/.stamp-dev ## Run those and all others: full searches, and beside them clusters and their faults (half an hour).
	@$(RUN_TESTS) all -- $(PYTEST_ARGS)

.PHONY: durations
durations: $(VENV)/.stamp-dev ## Write what tests cost into tests/durations.json, as the last test-all measured it.
	@$(BIN)/python scripts/durations.py build/tests/computing.xml build/tests/cluster.xml

# The newest JAX needs a newer Python than the oldest that Shardwright takes; pyenv's need not be on the path. Another:
# make NEWEST_PYTHON=/path/to/python test-newest
NEWEST_PYTHON ?= $(shell for python in python3.14 python3.13 python3.12 $(wildcard $(HOME)/.pyenv/versions/3.1[2-9]*/bin/python); do \
	$$python -c 'import venv' 2>/dev/null && echo $$python && break; done)

.PHONY: test-newest
test-newest: ## Run the quick tests with the newest JAX, in build/newest (Python 3.12 or newer).
	@if [ -z "$(NEWEST_PYTHON)" ]; then \
		echo "tests with the newest JAX are left out: no Python 3.12 or newer was found (make NEWEST_PYTHON=/path/to/python test-newest)"; \
	else \
		$(MAKE) --no-print-directory VENV=build/newest PYTHON=$(NEWEST_PYTHON) test; \
	fi

# Front ends whose tests have an environment of their own, in build/frontends.
FRONTENDS ?= keras torch tensorflow

.PHONY: test-frontends
test-frontends: $(VENV)/.stamp-dev ## Run all tests of the front ends, each in an environment with its framework.
	@scripts/test_frontends.sh $(FRONTENDS) -- $(PYTEST_ARGS)

.PHONY: golden
golden: $(VENV)/.stamp-dev ## Write the golden plans of the benchmark's models anew; git diff shows what changed.
	@$(BIN)/python -m tests.planner.golden_plans

.PHONY: check
check: $(VENV)/.stamp-dev ## Lint, format, types, import layers, generated code.
	@echo "ruff check" && $(BIN)/ruff check .
	@echo "ruff format" && $(BIN)/ruff format --check .
	@echo "mypy" && $(BIN)/mypy -p shardwright
	@echo "import layers" && $(BIN)/lint-imports
	@echo "protos" && $(BIN)/python scripts/generate_protos.py --check

.PHONY: format
format: $(VENV)/.stamp-dev ## Format the code and mend what lint can mend.
	@$(BIN)/ruff format . && $(BIN)/ruff check --fix .

.PHONY: protos
protos: $(VENV)/.stamp-dev ## Generate shardwright/proto from protos/.
	@$(BIN)/python scripts/generate_protos.py

.PHONY: site
site: $(VENV)/.stamp-dev ## Build the documents as a static site, in build/site.
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

.PHONY: bench
bench: $(VENV)/.stamp-dev ## Compare a step through the embedded server with plain jax.jit.
	@$(BIN)/python -m benchmarks.bench_step

.PHONY: numbers
numbers: $(VENV)/.stamp-dev ## Compare ten GPT-2 steps on servers with single-device JAX, for every kind of plan (10 minutes).
	@$(BIN)/python -m oracles.numerics

.PHONY: check-pipelines
check-pipelines: $(VENV)/.stamp-dev ## Compare pipelines on servers with single-device JAX: every model, schedule and number of workers (20 minutes).
	@$(BIN)/python -m oracles.pipeline_numerics

.PHONY: bench-exact
bench-exact: $(VENV)/.stamp-dev ## Compare the search with exhaustive search on 300 random programs, with and without a memory limit.
	@SHARDWRIGHT_EXACT_PROGRAMS=300 $(BIN)/python -m pytest tests/planner/test_exact.py

# XLA's compiler for GPUs; no GPU is needed. Another folder: make GPU_PACKAGES=/path bench-planner.
GPU_PACKAGES ?= build/gpu-packages

.PHONY: gpu-packages
gpu-packages: $(VENV)/.stamp-dev ## XLA's compiler for GPUs, of the jax in .venv, in build/ (570 MB).
	@test -d $(GPU_PACKAGES)/jax_plugins || { version=$$($(BIN)/python -c 'import jax; print(jax.__version__)') && \
		$(BIN)/python -m pip install --quiet --no-deps --target $(GPU_PACKAGES) \
		jax-cuda12-plugin==$$version jax-cuda12-pjrt==$$version nvidia-cuda-nvcc-cu12; }

# The TPU compiler; no TPU is needed.
TPU_PACKAGES ?= build/tpu-packages

.PHONY: tpu-packages
tpu-packages: $(VENV)/.stamp-dev ## The TPU compiler (libtpu), of the jax in .venv, in build/ (600 MB).
	@test -d $(TPU_PACKAGES)/libtpu || $(BIN)/python -c 'from shardwright.xla.compilers import TPU_PACKAGES; \
		print(*TPU_PACKAGES.requirements(), sep="\n")' | \
		xargs $(BIN)/python -m pip install --quiet --no-deps --target $(TPU_PACKAGES)

.PHONY: bench-planner
bench-planner: gpu-packages ## Hold plans against hand-written shardings, every model and budget, as compiled (hours); JSON in build/.
	@mkdir -p build && $(BIN)/python -m benchmarks.planner.frozen --gpu-packages $(GPU_PACKAGES) && $(BIN)/python -m benchmarks.planner.run --gpu-packages $(GPU_PACKAGES) --timing --json build/bench-planner.json

.PHONY: bench-planner-quick
bench-planner-quick: gpu-packages ## The same for one case a model, the whole budget (10 minutes).
	@mkdir -p build && $(BIN)/python -m benchmarks.planner.run --gpu-packages $(GPU_PACKAGES) --quick --json build/bench-planner-quick.json

.PHONY: bench-planner-unseen
bench-planner-unseen: gpu-packages ## The same for models that the planner was not built on, their experts counted on the way (long); JSON in build/.
	@mkdir -p build && $(BIN)/python -m benchmarks.planner.run --gpu-packages $(GPU_PACKAGES) --unseen --budgets 1 --json build/bench-planner-unseen.json

.PHONY: bench-ablation
bench-ablation: $(VENV)/.stamp-dev ## What each part of the search buys in time and quality, switched off by itself (two hours); JSON in build/.
	@mkdir -p build && $(BIN)/python -m benchmarks.planner.ablation --json build/ablation.json && $(BIN)/python -m benchmarks.planner.ablation_parts --json build/ablation-parts.json

.PHONY: plan-published
plan-published: $(VENV)/.stamp-dev ## Plan the published sizes of the examples for 64 nodes of 8 A100 (an hour); JSON in build/.
	@mkdir -p build && $(BIN)/python -m benchmarks.published.sizes --json build/plan-published.json

.PHONY: bench-runtime
bench-runtime: $(VENV)/.stamp-dev ## What the task runner adds to a step; simulated steps of pipelines against measured ones (10 minutes); JSON in build/.
	@mkdir -p build && $(BIN)/python -m benchmarks.runtime.overhead --json build/overhead.json
	@$(BIN)/python -m benchmarks.runtime.prediction --json build/prediction.json
	@$(BIN)/python -m benchmarks.runtime.prediction --workers 2 --skip-computing --json build/prediction-2.json

.PHONY: rank-pipelines
rank-pipelines: $(VENV)/.stamp-dev ## Rank plans of a small GPT-2 by prediction and by the clock (20 minutes); JSON in build/.
	@mkdir -p build && $(BIN)/python -m benchmarks.runtime.ranking --json build/ranking.json

.PHONY: bench-transfer
bench-transfer: $(VENV)/.stamp-dev ## Read 5,000 small arrays beside JAX's device_get, upload 512 MiB beside a bare gRPC stream.
	@$(BIN)/python benchmarks/bench_transfer.py

.PHONY: bench-parse
bench-parse: $(VENV)/.stamp-dev ## Time the HLO parser against XLA's own.
	@$(BIN)/python benchmarks/bench_parse.py

.PHONY: fuzz
fuzz: $(VENV)/.stamp-dev ## Feed mutated HLO, plans, pipelines and cluster files to their readers, calls to a server (30 minutes).
	@$(BIN)/python -m tests.fuzz && $(BIN)/python -m tests.fuzz.messages

.PHONY: validate-rules
validate-rules: $(VENV)/.stamp-dev ## Hold every strategy rule against XLA, in every combination (long).
	@$(BIN)/python -m oracles.rules

.PHONY: validate-linear
validate-linear: $(VENV)/.stamp-dev ## Hold every way of keeping sums partial against XLA (long).
	@$(BIN)/python -m oracles.linear

.PHONY: probe-moves
probe-moves: $(VENV)/.stamp-dev ## Compile every resharding and show which collectives XLA makes of it.
	@$(BIN)/python -m oracles.moves

.PHONY: verify-truth
verify-truth: $(VENV)/.stamp-dev ## Hold predicted collectives against XLA's, for small models, kinds of plans and meshes (20 minutes).
	@$(BIN)/python -m oracles.collectives --explain

.PHONY: check-small-steps
check-small-steps: $(VENV)/.stamp-dev ## Plan, prove and compute 26 small steps of many kinds beside single-device JAX (4 minutes).
	@$(BIN)/python -m oracles.small_steps

.PHONY: fuzz-truth
fuzz-truth: $(VENV)/.stamp-dev ## The same for random layouts of random arguments (an hour).
	@$(BIN)/python -m oracles.fuzz_collectives --explain

.PHONY: check-memory
check-memory: $(VENV)/.stamp-dev ## Compare predicted memory with XLA:CPU's, for many models and plans (half an hour).
	@$(BIN)/python -m oracles.memory

.PHONY: fuzz-memory
fuzz-memory: $(VENV)/.stamp-dev ## The same for random steps, layouts and memory limits (half an hour).
	@$(BIN)/python -m oracles.fuzz_memory

.PHONY: check-programs
check-programs: $(VENV)/.stamp-dev ## Hold pipelines against single-device JAX in one process: models, schedules, stages (20 minutes).
	@$(BIN)/python -m oracles.pipeline_programs --proof

# Others: make SCHEDULES=20 SEED=100 soak
SCHEDULES ?= 200
SEED ?= 0

.PHONY: soak
soak: $(VENV)/.stamp-dev ## Kill, freeze and cut off servers in 200 seeded schedules; results must not change (three quarters of an hour).
	@$(BIN)/python -m tests.recovery.soak --schedules $(SCHEDULES) --seed $(SEED)

.PHONY: soak-ranks
soak-ranks: $(VENV)/.stamp-dev ## Kill, hang and add elastic ranks in 200 seeded schedules; losses must not change (two hours).
	@$(BIN)/python -m tests.ranks.soak --schedules $(SCHEDULES) --seed $(SEED)

.PHONY: measure-cpu
measure-cpu: $(VENV)/.stamp-dev ## Measure the numbers of the cpu hardware profile on this machine.
	@$(BIN)/python benchmarks/measure_cpu_profile.py

.PHONY: clean
clean: ## Remove .venv, caches and build output.
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
