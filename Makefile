# The lanes: `make quick` while you work, `make check` on every change, `make check-weekly` and `check-minimum` every week.
VENV ?= .venv
BIN := $(VENV)/bin
TORCH ?= torch==2.13.0
# an index of torch's wheels beside the default one, for example that of its CPU builds
TORCH_INDEX ?=
INSTALL := install --quiet $(if $(TORCH_INDEX),--extra-index-url '$(TORCH_INDEX)')
EXTRAS ?= dev
WORKERS ?= 3
# caches by content: mypy compares hashes of files, numba and Triton hashes of sources
export MYPY_CACHE_DIR ?= $(CURDIR)/.cache/mypy
export NUMBA_CACHE_DIR ?= $(CURDIR)/.cache/numba
export TRITON_CACHE_DIR ?= $(CURDIR)/.cache/triton
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help setup quick check check-weekly check-minimum format lint lint-python lint-files types layers docs test bench clean

help:  ## list these verbs
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-13s %s\n", $$1, $$2}'

setup:  ## make .venv and install gsplit with its development tools: this torch, and the newest of everything else
	python3 -m venv $(VENV)
	$(BIN)/pip $(INSTALL) --no-compile '$(TORCH)' --editable '.[$(EXTRAS)]'

quick:  ## lint, layers, types, and the unit tests of the mini-batch path (about a minute)
	@$(MAKE) --no-print-directory --jobs 2 lint layers types test-middle

check:  ## everything CI runs: lint, layers, docs, types, tests; types beside the tests, which end last
	@$(MAKE) --no-print-directory --jobs 2 lint layers docs types test

check-weekly:  ## `make check` with the tests marked weekly
	@$(MAKE) --no-print-directory check PYTEST_ARGS="--weekly $(PYTEST_ARGS)"

MINIMUM ?= .venv-minimum
check-minimum:  ## the tests that a dependency can break, with the oldest versions that pyproject declares
	python3.11 -m venv $(MINIMUM)
	$(MINIMUM)/bin/pip $(INSTALL) --constraint requirements/minimum.txt --editable '.[arrow,ogb,mtkahypar,report,log]' \
		hypothesis networkx pytest pytest-timeout scipy
	OMP_NUM_THREADS=1 $(MINIMUM)/bin/python -m pytest tests/unit tests/exactness/test_exactness.py \
		--ignore tests/unit/test_house_rules.py --ignore tests/unit/test_package.py --ignore tests/unit/store/test_corruption.py \
		--ignore tests/unit/test_launch_recipes.py \
		--ignore tests/unit/store/test_real_graphs.py --durations=25 --durations-min=1 $(PYTEST_ARGS)

format:  ## format the code and fix lint errors
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lint: lint-python lint-files  ## format and rules of the code; Dockerfiles, scripts, issue forms, workflows, citation

lint-python:
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

FORMS = $(filter-out %/config.yml,$(wildcard .github/ISSUE_TEMPLATE/*.yml))
lint-files:
	$(BIN)/hadolint docker/*.Dockerfile
	$(BIN)/shellcheck .ci/run examples/launch/*.sh examples/launch/*.sbatch
	$(BIN)/check-jsonschema --builtin-schema vendor.github-issue-forms $(FORMS)
	$(BIN)/check-jsonschema --builtin-schema vendor.github-issue-config .github/ISSUE_TEMPLATE/config.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.citation-file-format CITATION.cff

types:  ## mypy --strict on src, tests, benchmarks and examples
	$(BIN)/mypy

layers:  ## which module may import which
	$(BIN)/lint-imports --no-cache

docs:  ## the documentation site, into build/site; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

test:  ## all tests, on WORKERS processes, and the slowest of them; PYTEST_ARGS="-k name" narrows them
	$(if $(WARM),$(BIN)/python tests/support/warm_kernels.py)
	$(BIN)/pytest --numprocesses $(WORKERS) --dist worksteal --durations=25 --durations-min=1 $(PYTEST_ARGS)

test-middle:
	$(BIN)/pytest --numprocesses $(WORKERS) -q tests/unit/keys tests/unit/sampling tests/unit/minibatch tests/unit/loading tests/unit/features

bench:  ## the import measurements of benchmarks/results (an hour, 60 GB of disk)
	$(BIN)/python -m gsplit_bench import-speed --billion

clean:  ## remove caches, not the virtual environment
	rm -rf build dist .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -not -path "./.venv*" -prune -exec rm -rf {} +
