# `make demo` and `make test` set themselves up on a machine that has only python3, pip and make.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
# Two workers with a thread each: two with all threads wait for one another. Tests of threads set their own.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

.PHONY: setup demo test test-all lint wheel docs tutorials soak bench

setup: $(READY)

$(READY): requirements.lock pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

demo: setup
	$(BIN)/modicum demo

test: setup
	$(PYTEST) -m "not soak and not heavy"

test-all: setup
	$(PYTEST) -m "not soak"

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

wheel: setup
	$(BIN)/python -m tests.wheel

docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build  # not --quiet: then it counts no warnings
	@echo "open build/site/index.html"

tutorials: setup
	$(BIN)/python docs/.site/notebook.py docs/tutorials/*.py

soak: SHELL := /bin/bash
soak: setup
	set -o pipefail; { git log -1 --format="commit %h"; $(PYTEST) -m soak --timeout=3600 -vv \
		--disable-warnings; } 2>&1 | sed -u "/^rootdir/d; s#$(CURDIR)/##g" | tee benchmarks/soak.log

bench: setup
	$(BIN)/python benchmarks/accounting.py
	$(BIN)/python benchmarks/ledger.py
	$(BIN)/modicum bench speed
