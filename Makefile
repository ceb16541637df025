# Verbs of the house. `make check` is exactly what CI runs.
VENV ?= .venv
BIN := $(VENV)/bin
TORCH ?= torch==2.13.0

.DEFAULT_GOAL := help
.PHONY: help setup check format lint types layers test test-data bench clean

help:  ## list these verbs
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

setup:  ## make .venv and install gsplit with its development tools (torch first, so that its build is chosen once)
	python3 -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet $(TORCH)
	$(BIN)/pip install --quiet --editable '.[dev]'

check: lint types layers test  ## everything CI runs: lint, types, layers, tests

format:  ## rewrite the code in the house format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lint:  ## ruff: format and rules
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types:  ## mypy --strict on src, tests and benchmarks
	$(BIN)/mypy

layers:  ## which file may import which
	$(BIN)/lint-imports --no-cache

test:  ## all tests; PYTEST_ARGS="-k name" narrows them
	$(BIN)/pytest $(PYTEST_ARGS)

bench:  ## the import measurements of benchmarks/results (an hour, 60 GB of disk)
	$(BIN)/python benchmarks/import_speed.py --billion

clean:  ## remove caches, not the virtual environment
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +
