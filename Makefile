# Every target makes its own environment in $(VENV) and reuses it: only a change of a pyproject.toml or
# of constraints.txt installs again. Needed beforehand: make and Python 3.11 or newer.
#
#   make test ARGS="-k cg"      arguments for the command behind a target; ARGS="-n 0 -k cg": in one process
#   make demo PYTHON=python3.12 another interpreter for a new environment

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
BIN := $(VENV)/bin

# Environment variables rather than options, so that the isolated build of the package obeys them too.
export PIP_CONSTRAINT := constraints.txt
export PIP_BUILD_CONSTRAINT := constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.NOTPARALLEL:  # the targets share one environment
.PHONY: help demo test check docs guide bench package clean
.DEFAULT_GOAL := help

help:  ## this list
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{ printf "make %-8s %s\n", $$1, $$2 }'

demo: $(VENV)/.lab  ## K-FAC and the natural gradient beside SGD and Adam on the embedded digits, with a report page
	$(BIN)/natgrad run digits $(ARGS)

test: $(VENV)/.test  ## every claim of the library, checked
	@$(BIN)/python -m compileall -q natgrad lab/natgrad_lab tests/shared  # for the processes that tests start, which may write none
	$(BIN)/python -m pytest -n auto --dist worksteal $(ARGS)

check: $(VENV)/.dev  ## format, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	@set -x; $(BIN)/pyright --pythonpath $(BIN)/python & plain=$$!; \
	$(BIN)/pyright --pythonpath $(BIN)/python --project strict-types.json; strict=$$?; \
	wait $$plain && exit $$strict

docs: $(VENV)/.docs  ## the documentation as a site in site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "open site/index.html"

guide:  ## one guide's code in an environment of its own, deleted afterwards: make guide NAME=lightning
	@$(PYTHON) docs/guides/try_guide.py $(NAME)

bench: $(VENV)/.bench  ## time and memory beside peers (takes minutes; ARGS=kfac for one table)
	$(BIN)/python -m benchmarks $(ARGS)

package: | $(BIN)/python  ## wheel and source archive in dist/, checked, and the wheel tried in an environment of its own
	rm -rf dist
	$(BIN)/python -m pip install --quiet build twine "pyright[nodejs]"
	$(BIN)/python -m build
	$(BIN)/python -m twine check --strict dist/*
	outside=$$(mktemp -d) && trap 'rm -rf "$$outside"' EXIT && $(PYTHON) -m venv "$$outside" && \
	"$$outside/bin/python" -m pip install --quiet dist/*.whl && cp tests/package/user_program.py "$$outside" && \
	check="$(abspath $(BIN))/pyright" && cd "$$outside" && bin/python user_program.py && \
	"$$check" --pythonpath bin/python user_program.py

clean:  ## remove the environment, the site and the caches; runs/ stays
	rm -rf $(VENV) site build dist .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# One stamp file per extra of pyproject.toml: test, bench, docs, dev. The laboratory, a package beside it, comes with each.
# dev holds test and docs: neither is installed again after it.
$(VENV)/.%: pyproject.toml lab/pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing natgrad[$*] and the laboratory into $(VENV) ..."
	@$(BIN)/python -m pip install --quiet --editable ".[$*]" --editable ./lab
	@touch $@ $(if $(filter dev,$*),$(VENV)/.docs $(VENV)/.test)

$(VENV)/.lab: pyproject.toml lab/pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing natgrad and the laboratory into $(VENV) ..."
	@$(BIN)/python -m pip install --quiet --editable . --editable ./lab
	@touch $@

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
