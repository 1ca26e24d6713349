# Each target does its own set-up: .venv is made on first use and again when the pins change.
#
# TORCH may name another build. On a GPU machine: make demo TORCH="torch --index-url <a CUDA index>". Where an index gives
# the CUDA build and a CPU is enough: make demo TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"
#
# uv installs in seconds what takes pip minutes, but it reads no pip.conf: where your index stands there, INSTALL="pip install".

VENV ?= .venv
PYTHON ?= $(shell command -v python3.11 || command -v python3)
TORCH ?= torch==2.13.0
INSTALL ?= uv pip install
BIN := $(VENV)/bin
DEMO := $(VENV)/.demo
READY := $(VENV)/.ready
VERSION ?= 0.19.2
MCORE := build/megatron-core/$(VERSION)
TE ?= 2.20.2
TE_DIR := build/transformer-engine/$(TE)

# Bytecode is kept, whatever the environment says: the tests start a hundred processes, and one that had to compile what it
# imports would take 1.6 s more for torch, 6 s for Megatron-Core, 18 s for vLLM.
unexport PYTHONDONTWRITEBYTECODE

# What builds our own package is pinned as all else is.
export UV_BUILD_CONSTRAINT := constraints.txt

# Of the environment that the argument names; both programs have the option, but not in the same place. torch is pip's,
# because pip.conf may name a folder with a CPU build; not compiling what nobody imports halves its time.
into = UV_PYTHON=$(1)/bin/python PIP_PYTHON=$(1)/bin/python $(BIN)/python -m
install_torch = $(call into,$(1)) pip install --quiet --no-compile $(TORCH)
install = $(call into,$(1)) $(INSTALL) --quiet

.PHONY: venv venv-vllm venv-verl demo grpo effect test test-slow test-mcore test-te test-verl test-wheel mutate mutants lint format docs bench clean

venv: $(READY)

# What `make demo` needs and no more: torch, Megatron-Core, typer and rich.
$(DEMO): pyproject.toml constraints.txt Makefile
	@echo "Making $(VENV) for the demo: 250 MB to download with a CPU build of torch, 1.0 GB on disk, half a minute."
	@echo "1 of 3: a virtual environment with $(PYTHON), and uv"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt uv
	@echo "2 of 3: $(TORCH), the longest step"
	@$(call install_torch,$(VENV))
	@echo "3 of 3: Megatron-Core, this package and its command line"
	@$(call install,$(VENV)) --constraint constraints.txt --editable '.[demo]'
	@touch $@

$(READY): $(DEMO)
	@echo "Adding what the tests use to $(VENV) (ray, transformers, matplotlib, mypy, ...): 200 MB to download, 0.8 GB on disk."
	$(call install,$(VENV)) --constraint constraints.txt --editable '.[test]'
	touch $@

# A gigabyte on disk, so not part of `make venv`: Megatron-Core imports it since 0.18.
$(VENV)/.triton: $(READY)
	$(call install,$(VENV)) --no-deps --constraint constraints.txt triton
	touch $@

$(VENV)/.docs: $(DEMO)
	$(call install,$(VENV)) --constraint constraints.txt --editable '.[docs]'
	touch $@

# Another Megatron-Core, in a folder of its own; from 0.17 on they ask for Python 3.12 and run on 3.11 all the same.
build/megatron-core/%/.ready: $(READY)
	rm -rf $(@D)
	$(call install,$(VENV)) --target $(@D) --no-deps --only-binary=:all: --python-version 3.12 megatron-core==$*
	touch $@

# Transformer Engine's Python alone, 1 MB: its compiled part needs CUDA, and tests/support/soft_te.py stands for it.
build/transformer-engine/%/.ready: $(READY)
	rm -rf $(@D)
	$(call install,$(VENV)) --target $(@D) --no-deps --only-binary=:all: transformer-engine==$*
	touch $@

# vLLM on a CPU, for `--engine vllm` and its test, and verl. Each has all that it needs but torch and Megatron-Core, which it
# finds in .venv through a .pth file: they are there once, and what .venv has in other versions stands behind its own.
venv-vllm: .venv-vllm/.ready
venv-verl: .venv-verl/.ready

PURELIB := import sysconfig; print(sysconfig.get_path("purelib"))
.venv-%/.ready: constraints-%.txt $(READY)
	rm -rf $(@D)
	$(BIN)/python -m venv --without-pip $(@D)
	echo "import site; site.addsitedir('$$($(BIN)/python -c '$(PURELIB)')')" \
		> "$$($(@D)/bin/python -c '$(PURELIB)')/shared.pth"
	$(call install,$(@D)) --no-deps --requirement $<
	touch $@

demo: $(DEMO)
	@echo "Running router-replay demo: two training steps on this CPU, about a quarter of a minute."
	@$(BIN)/router-replay demo

grpo: $(READY)
	$(BIN)/python -m examples.grpo compare

# What replay changes, measured: docs/effect.md. On demand, not part of CI.
effect: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m examples.effect gap
	OMP_NUM_THREADS=1 $(BIN)/python -m examples.effect freeze
	OMP_NUM_THREADS=1 $(BIN)/python -m examples.effect rl
	$(BIN)/python -m examples.effect figures

# Two processes take the files of tests in turns, each with workers of its own: about half the time, twice the memory. In the
# order of their names, for tests/functional has the long files: what is long must not come last.
PROCESSES ?= 2
PYTEST = -m pytest --numprocesses $(PROCESSES) --dist loadfile --no-loadscope-reorder --durations=30 --durations-min=1

# With the newest Megatron-Core that is tested; what differs in older ones is asked by `make test-mcore`.
test: $(VENV)/.triton $(MCORE)/.ready $(TE_DIR)/.ready
	PYTHONPATH=$(CURDIR)/$(MCORE) $(BIN)/python $(PYTEST) -m "not slow"
	$(test_te) -m "not slow"

# With the Megatron-Core of .venv, the oldest: the slow tests, and those that ask what differs between versions. OPTIONS may
# leave tests out: .ci/left_out.py prints the options for those that a change does not touch. Some wait for servers and
# time-outs, so a third process has work for the two processors.
test-slow: PROCESSES = 3
test-slow: $(READY)
	$(BIN)/python $(PYTEST) -m "slow or version" $(OPTIONS)

# The tests of mcore with another Megatron-Core: make test-mcore VERSION=0.18.2. MARKED=version runs those alone that ask
# what differs between versions; TESTS may name fewer files.
TESTS ?= tests/unit/mcore tests/functional/mcore
MARKED ?= not slow

test-mcore: $(VENV)/.triton $(MCORE)/.ready
	PYTHONPATH=$(CURDIR)/$(MCORE) $(BIN)/python $(PYTEST) -m "$(MARKED)" $(TESTS)

# Transformer Engine's layers and checkpoints, in a process that loads it before Megatron-Core; on several ranks, too. The next
# release is one number: make test-te TE=2.21.0. An older one wants an older Megatron-Core: make test-te TE=2.8.0 VERSION=0.16.1.
test_te = TE_DIR=$(CURDIR)/$(TE_DIR) PYTHONPATH=$(CURDIR)/$(MCORE) $(BIN)/python -m pytest tests/functional/transformer_engine

test-te: $(VENV)/.triton $(MCORE)/.ready $(TE_DIR)/.ready
	$(test_te) --durations=10

# verl's real Megatron engine, on a CPU over gloo, with our replay.
test-verl: .venv-verl/.ready
	.venv-verl/bin/python $(PYTEST) tests/functional/verl

# The wheel, and its demo in an environment without this checkout and what the tests use: PYTHON and TORCH may name others.
# It is built beside a module that an earlier build left behind, and which it must not hold.
test-wheel: $(READY)
	rm -rf build/wheel
	mkdir -p build/lib/megatron_router_replay && touch build/lib/megatron_router_replay/removed.py
	$(BIN)/python -m uv build --quiet --wheel --out-dir build/wheel
	$(PYTHON) -m venv --without-pip build/wheel/venv
	$(call install_torch,build/wheel/venv)
	$(call install,build/wheel/venv) --constraint constraints.txt "$$(echo build/wheel/*.whl)[demo]"
	WHEEL=build/wheel INSTALL="$(INSTALL)" $(BIN)/python $(PYTEST) tests/functional/test_wheel.py

# On demand: which changes of the code do the tests not notice? One run of KILLERS for each place in FILES.
FILES ?= $(wildcard megatron_router_replay/layout/*.py megatron_router_replay/trace/*.py)
KILLERS ?= tests/unit/layout tests/unit/trace
mutate: $(READY)
	$(BIN)/python -m tests.mutate $(FILES) --tests $(KILLERS)

# SAMPLE changes of every room, each against the room's own quick tests; ROOMS="layout trace" takes fewer.
SAMPLE ?= 20
mutants: $(VENV)/.triton $(MCORE)/.ready
	PYTHONPATH=$(CURDIR)/$(MCORE) $(BIN)/python -m tests.mutate --rooms $(ROOMS) --sample $(SAMPLE)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# How-tos and API reference as one site; needs no network, fails on a broken link or an undocumented public name.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict
	@echo "open build/docs/index.html"

bench: $(READY)
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) .venv-vllm .venv-verl build dist *.egg-info
