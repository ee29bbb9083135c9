# Everything runs in .venv, made when missing. See CONTRIBUTING.md.
SHELL := bash
.SHELLFLAGS := -o pipefail -c
PYTHON ?= python3
PIP_ARGS ?=
PYTEST_ARGS ?=
# Two workers even out what waits (torchrun starting) with what computes.
PYTEST_WORKERS ?= 2

# A venv remembers its absolute place: the stamp carries the checkout's, so that a copied
# or moved checkout makes its own instead of running the code it was copied from.
STAMP := .venv/.installed-$(shell printf '%s' "$(CURDIR)" | cksum | cut -d' ' -f1)
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
HOUSE := .venv/house/rankgate
FLOORS := coordinator agents proto

.PHONY: help demo test coverage lint types check format venv clean
.DEFAULT_GOAL := help

help:
	@echo 'make demo      run the demo on this machine'
	@echo 'make test      run the tests (PYTEST_ARGS="-k name -x")'
	@echo 'make coverage  demand full branch coverage of proto and coordinator/core'
	@echo 'make lint      ruff and the import contracts'
	@echo 'make types     mypy'
	@echo 'make check     test, lint and types'
	@echo 'make format    let ruff rewrite the sources'
	@echo 'make clean     remove the venv and everything built'

venv: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { \
	  echo 'error: $(PYTHON) not found; install Python 3.11 or newer, or set PYTHON=' >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: rankgate needs Python 3.11 or newer, $(PYTHON) is $$($(PYTHON) -V 2>&1); set PYTHON=" >&2; \
	  exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo 'error: $(PYTHON) cannot make a venv; on Debian: apt-get install python3-venv' >&2; exit 1; }
	@if [ ! -e $@ ]; then echo 'making .venv'; $(PYTHON) -m venv --clear .venv; fi
	$(PIP) install -q $(PIP_ARGS) -c constraints.txt setuptools torch
	$(PIP) install -q $(PIP_ARGS) -c constraints.txt --no-build-isolation -e '.[torch,dev]'
	@mkdir -p $(HOUSE)
	@for f in $(FLOORS); do ln -sfn "../../../$$f" "$(HOUSE)/$$f"; done
	@touch $@

demo: $(STAMP)
	@$(BIN)/rankgate demo

test: $(STAMP)
	$(BIN)/python -m pytest -n $(PYTEST_WORKERS) --dist worksteal $(PYTEST_ARGS)

coverage: $(STAMP)
	$(BIN)/python -m pytest --cov=rankgate.proto --cov=rankgate.coordinator.core --cov-branch \
	  --cov-report=term-missing:skip-covered --cov-fail-under=100 $(PYTEST_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	PYTHONPATH=.venv/house $(BIN)/lint-imports

types: $(STAMP)
	@echo 'mypy -p rankgate'; $(BIN)/mypy -p rankgate | sed 's|^$(HOUSE)/||'
	$(BIN)/mypy tests

check: test lint types

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv build dist *.egg-info .coverage .coverage.* coverage.xml htmlcov \
	  .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find $(FLOORS) tests -name __pycache__ -type d -prune -exec rm -rf {} +
