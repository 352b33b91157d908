# The two commands are `make reproduce-table` and `make test`; `make help` lists the rest.

EXPERIMENT ?= demo
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.DEFAULT_GOAL := help
.PHONY: help install reproduce-table test torture style lint types lock clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

reproduce-table: $(VENV)/.installed ## Train, evaluate and tabulate an experiment (EXPERIMENT=demo); finished work is not done twice
	$(BIN)/posbench train -m experiment=$(EXPERIMENT)
	$(BIN)/posbench eval $(EXPERIMENT)
	$(BIN)/posbench report $(EXPERIMENT)

install: $(VENV)/.installed ## Make .venv with the pinned dependencies and the package

test: $(VENV)/.installed-test ## The tests, with what they need
	$(BIN)/python -m pytest

torture: $(VENV)/.installed-test ## Kill runs 200 times and damage 1,000 checkpoints; about ten minutes
	$(BIN)/python -m tests.faults.torture --kills 200 --faults 1000 --every-moment

style: $(VENV)/.installed-dev ## Format the code
	$(BIN)/ruff format posbench tests benchmarks
	$(BIN)/ruff check --fix posbench tests benchmarks

lint: $(VENV)/.installed-dev ## Check format, lint and types
	$(BIN)/ruff format --check posbench tests benchmarks
	$(BIN)/ruff check posbench tests benchmarks
	$(BIN)/mypy

lock: $(VENV)/.installed-dev ## Resolve constraints.txt anew (torch stays as pinned in it)
	$(PIP) uv
	grep '^torch==' constraints.txt > $(VENV)/torch.txt
	$(BIN)/uv pip compile --universal --python-version 3.11 --extra dev --no-annotate --no-header \
		--constraint $(VENV)/torch.txt --upgrade pyproject.toml --output-file constraints.txt

clean: ## Remove .venv and caches; runs stay
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) --editable .
	@touch $@

$(VENV)/.installed-test: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) --editable '.[test]'
	@touch $@ $(VENV)/.installed

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) --editable '.[dev]'
	@touch $@ $(VENV)/.installed $(VENV)/.installed-test
