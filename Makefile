# make setup | demo | test | bench | notebooks | review | lab | clean. Everything lives in .venv; nothing else on the machine is touched.
SHELL := /bin/bash
.DEFAULT_GOAL := help
VENV := .venv
BIN := $(VENV)/bin
TORCH := $(shell sed -n 's/^\# \(torch==.*\)/\1/p' requirements.lock)
STAMP := $(VENV)/.installed
# Two test processes; the tests of a file share what its fixtures built. Notebooks that run engines have a folder of runs a process.
PARALLEL := -n 2 --dist loadfile --no-loadscope-reorder
NBVAL := --nbval-cell-timeout=900 -W default
# Notebooks that start no engine and draw from committed data: their outputs must come out as they are committed.
DETERMINISTIC := $(addprefix notebooks/,04_budget_frontier.ipynb 06_route_doctor.ipynb 08_compare_runs.ipynb)
# The long ones in turn, so that both processes have their share.
LAX := $(addprefix notebooks/,$(addsuffix .ipynb,09_scale_out 03_fisher_scores 01_quickstart 02_mismatch 07_policies 05_routing_shift))
# One OpenMP thread: on a few shared cores more of them cost many times what they bring.
export OMP_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export JUPYTER_PLATFORM_DIRS := 1

# The first interpreter that really is a CPython 3.11; override with make PYTHON=...
PYTHON ?= $(shell for p in python3.11 python3 python; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' >/dev/null 2>&1 && echo $$p && break; done)

# An environment that sees the packages of .venv beside its own, so that neither moves the other's versions: folder, requirements.
define beside
	@[ -x $(1)/bin/python ] || "$(PYTHON)" -m venv $(1)
	@$(BIN)/python -c 'import site; print(site.getsitepackages()[0])' > "$$($(1)/bin/python -c 'import site; print(site.getsitepackages()[0])')/rar.pth"
	@echo "installing $(2)"
	@$(1)/bin/python -m pip install --quiet --no-deps --requirement $(2)
	@touch $(1)/.installed
endef

.PHONY: help setup demo test bench parity browser notebooks review lab clean
help:
	@echo "make setup   environment in $(VENV) from requirements.lock"
	@echo "make demo    the quickstart on vLLM and Megatron-Core: none, R2 and R3"
	@echo "make test    ruff, types, pytest, nbval"
	@echo "make bench   timings as ratios, into benchmarks/results (half an hour; PARTS='job traces' for some)"
	@echo "make notebooks  execute all notebooks in place and normalise them"
	@echo "make review  what changed in the notebooks, as a person reads it (REV=main to compare with another revision)"
	@echo "make browser Chromium, for the tests that open JupyterLab (Debian, as root)"
	@echo "make parity  verl in an environment of its own, for the tests that compare with it"
	@echo "make lab     JupyterLab on 127.0.0.1 in notebooks/"
	@echo "make clean   remove $(VENV) and caches; runs in data/runs stay"

setup: $(STAMP)

$(STAMP): requirements.lock pyproject.toml
	@[ -n "$(PYTHON)" ] && "$(PYTHON)" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null \
		|| { echo "rar needs CPython 3.11; found $(or $(PYTHON),none). Install it, or: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@"$(PYTHON)" -c 'import venv, ensurepip' 2>/dev/null \
		|| { echo "rar needs the venv module of $(PYTHON) (on Debian: the package python3.11-venv)" >&2; exit 1; }
	@[ -x $(BIN)/python ] || "$(PYTHON)" -m venv $(VENV)
	@echo "installing $(TORCH)"
	@$(BIN)/python -m pip install --quiet --constraint requirements.lock "$(TORCH)"
	@echo "installing requirements.lock: some 280 packages, a few minutes"
	@$(BIN)/python -m pip install --quiet --no-deps --requirement requirements.lock
	@$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $(STAMP)

demo: $(STAMP)
	@$(BIN)/rar demo

test: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest $(PARALLEL)
	$(BIN)/python -m pytest $(PARALLEL) $(NBVAL) --nbval --nbval-sanitize-with tests/notebooks/sanitize.cfg $(DETERMINISTIC)
	$(BIN)/python -m pytest $(PARALLEL) -p tests.notebooks.workers $(NBVAL) --nbval-lax $(LAX)

bench: .venv-bench/.installed
	$(BIN)/python -m benchmarks $(PARTS)

.venv-bench/.installed: $(STAMP) benchmarks/requirements.txt
	$(call beside,.venv-bench,benchmarks/requirements.txt)

parity: .venv-verl/.installed

.venv-verl/.installed: $(STAMP) tests/parity/requirements-verl.txt
	$(call beside,.venv-verl,tests/parity/requirements-verl.txt)

# Debian's Chromium: playwright drives it, and downloads none of its own.
browser:
	@command -v chromium >/dev/null || { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium >/dev/null; }
	@command -v chromium

notebooks: $(STAMP)
	$(BIN)/python -m tests.notebooks.execute

review: $(STAMP)
	@git -c diff.jupyternotebook.command="$(CURDIR)/$(BIN)/git-nbdiffdriver diff" diff $(REV) -- notebooks

lab: $(STAMP)
	$(BIN)/jupyter lab --ip=127.0.0.1 --notebook-dir=notebooks $(if $(filter 0,$(shell id -u)),--allow-root)

clean:
	rm -rf $(VENV) .venv-verl .venv-bench build *.egg-info .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
