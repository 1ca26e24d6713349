# Each target does its own set-up: .venv is made on first use and again when the pins change.
#
# TORCH may name another build, for example on a GPU machine: make test TORCH="torch --index-url <a CUDA index>"

VENV ?= .venv
PYTHON ?= $(shell command -v python3.11 || command -v python3)
TORCH ?= torch==2.13.0
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: venv demo test test-slow lint format bench clean

venv: $(READY)

$(READY): setup.py constraints.txt Makefile
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[test]'
	touch $@

demo: $(READY)
	$(BIN)/router-replay demo

test: $(READY)
	$(BIN)/python -m pytest -m "not slow"

test-slow: $(READY)
	$(BIN)/python -m pytest -m slow

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) build dist *.egg-info
