# Every target sets itself up: the first one makes .venv from requirements.lock.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   := .venv
READY  := $(VENV)/.ready

.PHONY: help setup demo test test-gpu lint bench

help:
	@echo "make demo      train ATLAS and LeWM on TwoRoom, plan with both, diagnose and report in runs/demo/ (about 10 minutes on 2 cores)"
	@echo "make test      lint, types and the whole test suite"
	@echo "make test-gpu  the tests of what runs on a CUDA device alone (a few minutes; without one it says so and does nothing)"
	@echo "make bench     speed of loader, planning, evaluation and training beside stable-worldmodel's"
	@echo "make setup     only make .venv (the other targets do it when needed)"

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

lint: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

test: lint
	$(VENV)/bin/python -m pytest -n auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder

test-gpu: $(READY)
	@if [ "$$($(VENV)/bin/python -c 'import torch; print(torch.cuda.is_available())')" = False ]; \
	then echo "make test-gpu: no CUDA device here, so nothing was tested"; \
	else $(VENV)/bin/python -m pytest tests/gpu; fi
