# `make train` and `make test` work from a fresh clone; `make help` lists the rest.
# ARGS passes options on, as in `make test ARGS="-k causal -x"` or `make train ARGS="--task images"`.
# PYTHON names an interpreter to build the environment with; else python3.12 or python3 from PATH, else uv.

VENV := .venv
NEWEST := .venv-newest
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
ARGS :=

# pytest runs one worker per core, so the other thread pools of a worker get one thread.
test test-full smoke newest coverage: export OMP_NUM_THREADS = 1
test test-full smoke newest coverage: export OPENBLAS_NUM_THREADS = 1
# Most programs of the tests run once: compiling them without optimization, by the emitters that don't go through MLIR, and
# in one piece takes a sixth of the time. `make smoke` and `make newest` compile as users do.
test test-full: export XLA_FLAGS := --xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1 \
	--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters $(XLA_FLAGS)

.DEFAULT_GOAL := help
.PHONY: help setup train test test-full coverage smoke newest lint format bench results clean

help: ## List the targets
	@awk -F ': .*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(READY) ## Make the development environment in .venv

$(READY): pyproject.toml constraints.txt
	@$(PY) -m pip --version > /dev/null 2>&1 || { $(call create,$(VENV)); }
	@$(call install,$(VENV)) --constraint constraints.txt --editable '.[dev]'
	@touch $@

train: setup ## Train the tiny GPT on text found on this machine
	$(PY) -m models.train --size tiny $(ARGS)

test: lint ## Run the lint checks, and tests that see every behaviour once (8 minutes on two cores)
	$(PY) -m pytest -n logical -m 'not gpu and not full' $(ARGS)

test-full: setup ## Run what `make test` leaves out: the whole tables
	$(PY) -m pytest -n logical -m 'full and not gpu' $(ARGS)

coverage: setup ## Run all tests that need no GPU, and print which lines and branches of pallas_fa/ they reach
	$(PY) -m pytest -n logical -m 'not gpu' --cov=pallas_fa --cov-branch --cov-report=term $(ARGS)

smoke: setup ## Run the short tests only
	$(PY) -m pytest -n logical -m 'smoke and not gpu' $(ARGS)

newest: ## Run the short tests on the newest JAX and its company, in .venv-newest
	@$(call create,$(NEWEST))
	@$(call install,$(NEWEST)) --editable '.[dev]'
	@$(NEWEST)/bin/python -c 'import sys; from importlib.metadata import version; \
		print("Python", sys.version.split()[0], *(f"{p} {version(p)}" for p in ("jax", "jaxlib", "flax", "numpy")))'
	$(NEWEST)/bin/python -m pytest -n logical -m 'smoke and not gpu' -W default::DeprecationWarning $(ARGS)

lint: setup ## Check format, style, types, and who imports whom
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m pyright
	$(VENV)/bin/lint-imports

format: setup ## Format, and repair what ruff can
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

bench: setup ## Measure this machine, and plot
	$(PY) -m benchmarks.run $(ARGS)

results: setup ## Draw the rows that are kept, and write docs/results.md from them
	$(PY) -m benchmarks.plot
	$(PY) -m benchmarks.report

clean: ## Remove the environments and caches; what training wrote stays
	rm -rf $(VENV) $(NEWEST) build dist .hypothesis .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# $(call create,DIR): a fresh virtual environment with Python 3.12 or newer.
define create
set -e; for python in $(or $(PYTHON),python3.12 python3); do \
	if $$python -c 'import sys; sys.exit(sys.version_info < (3, 12))' > /dev/null 2>&1; then break; fi; \
	python=; \
done; \
if [ -n "$$python" ]; then \
	echo "Making $(1) with $$($$python --version)"; $$python -m venv --clear $(1); \
elif [ -z '$(PYTHON)' ] && uv --version > /dev/null 2>&1; then \
	rm -rf $(1); uv venv --seed --python 3.12 $(1); \
else \
	echo "No Python 3.12 or newer found (tried: $(or $(PYTHON),python3.12 python3 uv))." >&2; \
	echo "Install one, for example with 'pyenv install 3.12' or your system's packages, or install uv, and run make again;" >&2; \
	echo "or name one that is not on PATH: make setup PYTHON=/path/to/python3.12" >&2; \
	exit 1; \
fi
endef

# $(call install,DIR): the install command for that environment, by uv where there is one.
define install
pip="$(1)/bin/python -m pip"; uv --version > /dev/null 2>&1 && pip="uv pip"; \
VIRTUAL_ENV=$(CURDIR)/$(1) $$pip install
endef
