# Verbs of the house. `make check` is exactly what CI runs.
VENV ?= .venv
BIN := $(VENV)/bin
TORCH ?= torch==2.13.0
TRITON ?= triton==3.7.1
WORKERS ?= 2

.DEFAULT_GOAL := help
.PHONY: help setup check check-minimum format lint types layers docs test bench clean

help:  ## list these verbs
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-13s %s\n", $$1, $$2}'

setup:  ## make .venv and install gsplit with its development tools (torch and triton by name, so that their builds are chosen once)
	python3 -m venv $(VENV)
	$(BIN)/pip install --quiet --no-compile '$(TORCH)' '$(TRITON)' --editable '.[dev]'

check:  ## everything CI runs: lint, layers, docs, types, tests; types beside the tests, which end last
	@$(MAKE) --no-print-directory --jobs 2 lint layers docs types test

MINIMUM ?= .venv-minimum
check-minimum:  ## the tests that a dependency can break, with the oldest versions that pyproject declares
	python3.11 -m venv $(MINIMUM)
	$(MINIMUM)/bin/pip install --quiet --constraint requirements/minimum.txt --editable '.[arrow,ogb,mtkahypar,report]' \
		hypothesis networkx pytest pytest-timeout scipy
	OMP_NUM_THREADS=1 $(MINIMUM)/bin/python -m pytest tests/unit tests/dist/test_golden.py tests/dist/test_models.py \
		--ignore tests/unit/test_house_rules.py --ignore tests/unit/store/test_corruption.py \
		--ignore tests/unit/store/test_real_graphs.py --durations=25 --durations-min=1 $(PYTEST_ARGS)

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

docs:  ## the documentation site, into build/site; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

test:  ## all tests, on WORKERS processes, and the slowest of them; PYTEST_ARGS="-k name" narrows them
	$(if $(WARM),$(BIN)/python tests/support/warm_kernels.py)
	$(BIN)/pytest --numprocesses $(WORKERS) --dist worksteal --durations=25 --durations-min=1 $(PYTEST_ARGS)

bench:  ## the import measurements of benchmarks/results (an hour, 60 GB of disk)
	$(BIN)/python -m gsplit_bench import-speed --billion

clean:  ## remove caches, not the virtual environment
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -not -path "./.venv*" -prune -exec rm -rf {} +
