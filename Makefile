# The two commands are `make reproduce-table` and `make test`; `make help` lists the rest.

EXPERIMENT ?= demo
# Runs that are evaluated side by side.
JOBS ?= 2
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Tests run on every core, one thread each; a file's tests stay in one process, which makes its fixtures once.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --dist loadscope
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
COMPILE := $(BIN)/uv pip compile --universal --python-version 3.11 --group build --no-annotate --no-header pyproject.toml
HASHED := --constraint constraints.txt --generate-hashes
TORCH = $$(awk -F == '/^(torch|triton|cuda-|nvidia-)/ {print "--no-emit-package " $$1}' constraints.txt)

.DEFAULT_GOAL := help
.PHONY: help install develop reproduce-table test test-all torture style lint lock clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

reproduce-table: $(VENV)/.installed ## Train, evaluate and tabulate an experiment (EXPERIMENT=demo); finished work is skipped
	$(BIN)/posbench train -m experiment=$(EXPERIMENT)
	$(BIN)/posbench eval $(EXPERIMENT) --jobs $(JOBS)
	$(BIN)/posbench report $(EXPERIMENT)

install: $(VENV)/.installed ## Make .venv with the pinned dependencies and the package

develop: $(VENV)/.developed ## The same, and what tests and lint need

test: $(VENV)/.developed ## The fast tests: three minutes on two cores
	$(PYTEST) -m "not slow"

test-all: $(VENV)/.developed ## Every test: kills, several processes, every experiment; 15 minutes
	$(PYTEST)

torture: $(VENV)/.developed ## Kill runs 200 times and damage 1,000 checkpoints; about ten minutes
	$(BIN)/python -m tests.faults.torture --kills 200 --faults 1000

style: $(VENV)/.developed ## Format the code
	$(BIN)/ruff format posbench hydra_plugins tests benchmarks
	$(BIN)/ruff check --fix posbench hydra_plugins tests benchmarks

lint: $(VENV)/.developed ## Check format, lint and types
	$(BIN)/ruff format --check posbench hydra_plugins tests benchmarks
	$(BIN)/ruff check posbench hydra_plugins tests benchmarks
	$(BIN)/mypy

lock: $(VENV)/.developed ## Resolve constraints.txt and both files of requirements anew (torch stays as pinned)
	$(PIP) uv
	grep '^torch==' constraints.txt > $(VENV)/torch.txt
	$(COMPILE) --extra dev --constraint $(VENV)/torch.txt --upgrade --output-file constraints.txt
	$(COMPILE) $(HASHED) --output-file requirements.txt $(TORCH)
	$(COMPILE) $(HASHED) --extra dev --output-file requirements-dev.txt $(TORCH)

clean: ## Remove .venv and caches; runs stay
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# Every file is held to its hash, but torch's: its builds for CUDA, ROCm and CPU differ, so its version alone is pinned.
$(VENV)/.installed: pyproject.toml requirements.txt constraints.txt | $(VENV)/bin/python
	$(PIP) --require-hashes --requirement requirements.txt
	$(PIP) --constraint constraints.txt torch
	$(PIP) --no-deps --no-build-isolation --editable .
	@touch $@

$(VENV)/.developed: requirements-dev.txt $(VENV)/.installed
	$(PIP) --require-hashes --requirement requirements-dev.txt
	@touch $@
