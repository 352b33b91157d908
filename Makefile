# The two commands are `make reproduce-table` and `make test`; `make help` lists the rest.

EXPERIMENT ?= demo
# Runs that are evaluated side by side.
JOBS ?= 2
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Tests run on every core, one thread each; a file's tests stay in one process, which makes its fixtures once.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --dist loadscope
# pip prints a line for each package: an installation takes minutes.
PIP := $(BIN)/python -m pip install --disable-pip-version-check --no-compile
# pip would compile with one core.
COMPILE := @echo "Compiling the packages on all cores" && $(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true

.DEFAULT_GOAL := help
.PHONY: help install develop reproduce-table round test test-all torture style lint lists site lock clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

reproduce-table: $(VENV)/.installed ## Train, evaluate and tabulate an experiment (EXPERIMENT=demo); finished work is skipped
	$(BIN)/posbench train -m experiment=$(EXPERIMENT)
	$(BIN)/posbench eval $(EXPERIMENT) --jobs $(JOBS)
	$(BIN)/posbench report $(EXPERIMENT)

# The rounds of "still to train" (docs/experiments.md). A round that was stopped goes on with the same command.
# RATE: the best learning rate of the search of round 1, by scheme; LOW: ALiBi's.
RATE ?= 4e-3
LOW ?= 2e-3
MUON := experiment=headline_muon runs_dir=runs/reference
AT_6M := train.tokens=6_144_000 train.trunk_tokens=12_288_000 'train.branch_tokens=[]'
ROUND_1 := tune $(MUON) scheme=vo_rope,nope
ROUND_2 := tune experiment=headline experiment_name=headline-6.14M runs_dir=runs/reference scheme=vo_rope,nope $(AT_6M)
AT_12M := train.tokens=12_288_000 train.trunk_tokens=null experiment_name=headline_muon_long
ROUND_4 := train -m $(MUON) $(AT_12M) scheme=qk_rope,vo_rope scheme.lr=$(RATE) seed=2,3,4
ROUND_4a := train -m $(MUON) $(AT_12M) scheme=alibi scheme.lr=$(LOW) seed=1,2,3,4
ROUND_4c := train -m $(MUON) $(AT_12M) scheme=vo_rope scheme.lr=$(RATE) seed=0,1
ROUND_4b := train -m $(MUON) $(AT_12M) scheme.lr=$(RATE) scheme=window_rope_nope,canon_nope,canon_qk_rope,key_offset seed=0,1,2
EXTEND := train -m experiment=extend runs_dir=runs/reference
ROUND_7 := $(EXTEND) scheme=alibi,canon_nope
ROUND_7a := $(EXTEND) scheme=window_rope_nope 'scheme.layers=[window_qk_rope,window_qk_rope,nope]'
ROUND_7b := $(EXTEND) scheme=window_rope_nope scheme.name=window_full_rope 'scheme.layers=[window_qk_rope,window_qk_rope,qk_rope]'
SETUPS := train -m experiment=setups runs_dir=runs/reference
ROUND_s2 := $(SETUPS) seed=16,19,21,22
ROUND_s3 := $(SETUPS) seed=8,9,10,11,12,13,14,15,25,26,28,31
ROUND_s4 := $(SETUPS) scheme=vo_rope seed=0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15
GLOBAL_LAYER := train -m experiment=global_layer runs_dir=runs/reference
ROUND_g1 := $(GLOBAL_LAYER) seed=1000 scheme.lr=1e-3,2e-3,4e-3 'experiment_name=global_layer-lr=$${scheme.lr}'
ROUND_g2 := $(GLOBAL_LAYER)
ROUND_6 := train -m $(MUON) data=sotu scheme=vo_rope,nope seed=1,2 scheme.lr=$(RATE) experiment_name=prose_muon

round: $(VENV)/.installed ## Train a round of "still to train" in docs/experiments.md (R=1)
	$(BIN)/posbench $(ROUND_$(R)) --jobs $(JOBS)

install: $(VENV)/.installed ## Make .venv with the pinned dependencies and posbench
	@echo "Next: $(BIN)/posbench train -m scheme=nope,qk_rope,alibi seed=0,1 experiment_name=first --jobs 2"
	@echo "then: $(BIN)/posbench report first"

develop: $(VENV)/.developed ## The same, and what tests and lint need

test: $(VENV)/.developed ## The fast tests: three to five minutes on two cores
	$(PYTEST) -m "not slow"

test-all: $(VENV)/.developed ## Every test: kills, several processes, every experiment; 13 minutes
	$(PYTEST)

ifndef SEED
SEED := $(shell date +%s)
endif
torture: $(VENV)/.developed ## Draw other examples for property tests, then kill runs 200 times; about ten minutes
	@echo "Repeat with: make torture SEED=$(SEED). Write an example that failed down with @example."
	$(PYTEST) -m hypothesis --hypothesis-profile torture --hypothesis-seed $(SEED)
	$(BIN)/python -m tests.faults.torture --kills 200 --seed $(SEED)

style: $(VENV)/.developed ## Format the code
	$(BIN)/ruff format posbench hydra_plugins tests benchmarks docs/site
	$(BIN)/ruff check --fix posbench hydra_plugins tests benchmarks docs/site

lint: $(VENV)/.developed ## Check format, lint, spelling, types and the layers of imports
	$(BIN)/ruff format --check posbench hydra_plugins tests benchmarks docs/site
	$(BIN)/ruff check posbench hydra_plugins tests benchmarks docs/site
	$(BIN)/codespell *.md docs conf posbench hydra_plugins benchmarks
	$(BIN)/mypy
	$(BIN)/lint-imports

lists: $(VENV)/.developed ## Write docs/lists and the list of packs again, from the code, the experiments and the packs
	$(BIN)/python docs/site/generated.py

site: $(VENV)/.sited ## Build the site from the documents and the packs (site/index.html); some minutes
	$(BIN)/mkdocs build --strict --config-file docs/site/mkdocs.yml

lock: $(VENV)/.developed ## Resolve constraints.txt anew (torch stays as pinned)
	$(PIP) uv
	grep '^torch==' constraints.txt > $(VENV)/torch.txt
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --no-annotate --no-header pyproject.toml --extra dev --extra site \
		--constraint $(VENV)/torch.txt --upgrade --output-file $(VENV)/resolved.txt
	grep -vE '^(triton|cuda-|nvidia-)' $(VENV)/resolved.txt > constraints.txt

clean: ## Remove .venv and caches; runs stay
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# Versions are pinned. Triton's and NVIDIA's are not: each build of torch (CUDA, ROCm, CPU) pins its own.
$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) --constraint constraints.txt --editable .
	$(COMPILE)
	@touch $@

$(VENV)/.developed: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) --constraint constraints.txt --editable '.[dev]'
	$(COMPILE)
	@touch $(VENV)/.installed $@

$(VENV)/.sited: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) --constraint constraints.txt --editable '.[site]'
	@touch $(VENV)/.installed $@
