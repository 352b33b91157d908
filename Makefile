# The two commands are `make reproduce-table` and `make test`; `make help` lists the rest.

EXPERIMENT ?= demo
# Runs that are evaluated side by side.
JOBS ?= 2
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The tests run in two processes side by side: most of them use one core.
HALF := tests/cli tests/data tests/reporting tests/schemes tests/security
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
COMPILE := $(BIN)/uv pip compile --universal --python-version 3.11 --extra dev --group build --no-annotate --no-header \
	pyproject.toml

.DEFAULT_GOAL := help
.PHONY: help install reproduce-table test torture style lint types lock clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

reproduce-table: $(VENV)/.installed ## Train, evaluate and tabulate an experiment (EXPERIMENT=demo); finished work is not done twice
	$(BIN)/posbench train -m experiment=$(EXPERIMENT)
	$(BIN)/posbench eval $(EXPERIMENT) --jobs $(JOBS)
	$(BIN)/posbench report $(EXPERIMENT)

install: $(VENV)/.installed ## Make .venv with the pinned dependencies and the package

test: $(VENV)/.installed ## The tests, with what they need
	@export OMP_NUM_THREADS=1; \
	$(BIN)/python -m pytest $(HALF) > $(VENV)/half.log 2>&1 & half=$$!; \
	$(BIN)/python -m pytest $(addprefix --ignore=,$(HALF)); rest=$$?; \
	wait $$half; half=$$?; cat $(VENV)/half.log; exit $$((half || rest))

torture: $(VENV)/.installed ## Kill runs 200 times and damage 1,000 checkpoints; about ten minutes
	$(BIN)/python -m tests.faults.torture --kills 200 --faults 1000 --every-moment

style: $(VENV)/.installed ## Format the code
	$(BIN)/ruff format posbench hydra_plugins tests benchmarks
	$(BIN)/ruff check --fix posbench hydra_plugins tests benchmarks

lint: $(VENV)/.installed ## Check format, lint and types
	$(BIN)/ruff format --check posbench hydra_plugins tests benchmarks
	$(BIN)/ruff check posbench hydra_plugins tests benchmarks
	$(BIN)/mypy

lock: $(VENV)/.installed ## Resolve constraints.txt and requirements.txt anew (torch stays as pinned)
	$(PIP) uv
	grep '^torch==' constraints.txt > $(VENV)/torch.txt
	$(COMPILE) --constraint $(VENV)/torch.txt --upgrade --output-file constraints.txt
	$(COMPILE) --constraint constraints.txt --generate-hashes --output-file requirements.txt \
		$$(awk -F == '/^(torch|triton|cuda-|nvidia-)/ {print "--no-emit-package " $$1}' constraints.txt)

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
