# Every target creates .venv from requirements.lock when it is missing or out of date.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   := .venv
READY  := $(VENV)/.ready

.PHONY: help setup demo test test-gpu lint style bench docs docs-serve

help:
	@echo "make demo        collect, train ATLAS and LeWM on TwoRoom, evaluate, diagnose, report: runs/demo/ (8 to 15 minutes on 2 cores)"
	@echo "make test        lint, types and all tests"
	@echo "make test-gpu    tests that need a CUDA device (a few minutes; does nothing without one)"
	@echo "make docs        build the documentation into site/ (broken links fail)"
	@echo "make docs-serve  build it and serve it at http://127.0.0.1:8000"
	@echo "make bench       speed of loading, planning, evaluation and training next to stable-worldmodel"
	@echo "make setup       create .venv only (the other targets do it when needed)"

setup: $(READY)

$(READY): requirements.lock pyproject.toml
	@echo "Setting up $(VENV) (about 7 GB with the CUDA build of torch, a few minutes) ..."
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	@touch $@

demo: $(READY)
	$(VENV)/bin/atlas demo

bench: $(READY)
	$(VENV)/bin/python benchmarks/loader.py
	$(VENV)/bin/python benchmarks/planning.py
	$(VENV)/bin/python benchmarks/evaluation.py
	$(VENV)/bin/python benchmarks/training.py

docs: $(READY)
	$(VENV)/bin/python tools/reference_pages.py
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict --quiet
	@echo "open site/index.html"

docs-serve: docs
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs serve

lint: style
	$(VENV)/bin/mypy

style: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

test: style  # types: tests/test_types.py
	$(VENV)/bin/python -m pytest -n auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder

test-gpu: $(READY)
	@if [ "$$($(VENV)/bin/python -c 'import torch; print(torch.cuda.is_available())')" = False ]; \
	then echo "make test-gpu: no CUDA device, nothing was tested"; \
	else $(VENV)/bin/python -m pytest tests/gpu; fi
