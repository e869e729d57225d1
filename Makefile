# trnc: everything a newcomer needs is `make serve`, everything a developer needs is `make check test`.
PYTHON ?= python3
VENV ?= .venv
PORT ?= 8000
PRESET ?= default
MODEL ?= smollm2-135m
BIN := $(VENV)/bin

.PHONY: setup serve compile test check bench clean

# The mark is renewed when the dependencies change; an interrupted install leaves none.
$(VENV)/.ready: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: trnc needs Python 3.11 or later, and $(PYTHON) is not one; try make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@echo "Setting up $(VENV): a few minutes the first time, most of it PyTorch"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --progress-bar on --disable-pip-version-check --editable .
	@touch $@

$(VENV)/.ready-dev: $(VENV)/.ready
	$(BIN)/python -m pip install --progress-bar on --disable-pip-version-check --editable '.[dev]'
	@touch $@

setup: $(VENV)/.ready

serve: setup
	$(BIN)/trnc serve --model $(MODEL) --preset $(PRESET) --port $(PORT)

compile: setup
	$(BIN)/trnc compile --model $(MODEL) --preset $(PRESET)

test: $(VENV)/.ready-dev
	$(BIN)/python -m pytest --numprocesses auto --dist loadfile --no-loadscope-reorder

check: $(VENV)/.ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/graph_equiv.py check
	$(BIN)/python tools/graph_equiv.py prove --promises

bench: setup
	$(BIN)/trnc bench --model $(MODEL) --preset $(PRESET)

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
