# Each stamp in .venv is an installation done once, and again when what it depends on changes.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --constraint constraints.txt
# The oldest versions are only to be had for the oldest Python.
OLDEST_PYTHON ?= python3.11
OLDEST := .venv-oldest
OLDEST_PIP := $(OLDEST)/bin/python -m pip install --quiet --constraint constraints-oldest.txt

# The core in half a minute: what a round computes, step by step, without processes and the network. Runs
# of several rounds (learning, resume, every fleet against the plain twin) are left to `make test`.
QUICK := tests/algorithm tests/settings tests/test_imports.py \
	$(addprefix tests/data/test_,batches.py augment.py) \
	$(addprefix tests/models/test_,passes.py modules.py own.py) \
	$(addprefix tests/engine/test_,plain_forms.py sgd.py sums.py weights.py) \
	$(addprefix tests/fleet/test_,codec.py local.py outgoing.py) \
	$(addprefix tests/methods/test_,semisfl.py semifl.py fedmatch.py fedswitch.py fedswitch_sl.py \
	fl2.py full_model.py influence.py mixup.py)
LONG := learns or (twin and not two_level) or resume or formula or aborted or counted or codecs_lose

.PHONY: help demo quick test test-network test-slow test-kernels test-oldest mutants chaos check bench results image-test clean

help:
	@echo "make demo       train on the embedded digits: a table, and a picture under runs/"
	@echo "make quick      tests of the core in half a minute: algorithm, methods, settings, batches, fleet"
	@echo "make test       the tests (make test-network: the matrix of network faults;"
	@echo "                make test-slow: those that take minutes; make test-kernels:"
	@echo "                the GPU's kernels in Triton's interpreter; make test-oldest: with the"
	@echo "                oldest versions of everything that pyproject.toml promises)"
	@echo "make mutants    deliberately wrong changes, one at a time: the tests must notice each"
	@echo "make chaos      ten minutes of dying, frozen and lying clients, server kills, full disks;"
	@echo "                then 200 more clients and servers killed at any moment"
	@echo "make check      lint, format, types"
	@echo "make bench      milliseconds per iteration and images per second on this machine"
	@echo "make results    write every table of the pages that comes from runs, from reproduction/records"
	@echo "make image-test build the container image and train a server and two devices in containers"
	@echo "make clean      remove the virtual environments and caches; runs stay"

demo: $(VENV)/.installed
	$(BIN)/semisfl compare digits --methods supervised,semisfl --seeds 1 \
		--out runs/demo-$$(date +%Y%m%d-%H%M%S)

# Files of tests differ a lot in how long they take: an idle worker takes over from a busy one.
# Two workers more than cores, as some tests only wait: for deadlines, or for other processes.
# Workers, and the processes that tests start, import what the first of them compiled.
unexport PYTHONDONTWRITEBYTECODE
PARALLEL := -n $(shell expr $$(getconf _NPROCESSORS_ONLN) + 2) --dist worksteal

quick: $(VENV)/.installed-test
	$(BIN)/python -m pytest $(PARALLEL) -m "not slow and not gpu" -k "not ($(LONG))" $(QUICK)

# The matrix of network faults is `make test-network`: most of its tests wait for deadlines and processes.
NETWORK := tests/net
IN_TEST := $(addprefix tests/net/test_,fleet.py frames.py chunks.py agreement.py quotas.py upload_attack.py)

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest $(PARALLEL) -m "not slow and not gpu" \
		$(filter-out $(NETWORK)/,$(wildcard tests/[a-z]*/)) $(wildcard tests/test_*.py) $(IN_TEST)

test-network: $(VENV)/.installed-test
	$(BIN)/python -m pytest $(PARALLEL) -m "not slow and not gpu" $(NETWORK) $(addprefix --ignore=,$(IN_TEST))

test-slow: $(VENV)/.installed-test
	$(BIN)/python -m pytest -m "slow and not gpu"

test-kernels: $(VENV)/.installed-test
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -n auto tests/engine/test_kernels.py

test-oldest: $(OLDEST)/.installed
	$(OLDEST)/bin/python -m pytest $(PARALLEL) -m "not slow and not gpu"

mutants: $(VENV)/.installed-test
	$(BIN)/python -m tests.mutants.run

chaos: $(VENV)/.installed-test
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.net.chaos $(CHAOS)
	$(BIN)/python -m pytest $(PARALLEL) -m slow -k hundred tests/net/test_faults.py

check: $(VENV)/.installed-test $(VENV)/.installed-check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.installed-test
	$(BIN)/python -m reproduction bench
	$(BIN)/python -m reproduction.benchmarks.twin
	$(BIN)/python -m reproduction.benchmarks.network

results: $(VENV)/.installed
	$(BIN)/python -m reproduction results

image-test:
	BASE="$(BASE)" IMAGE_ARGS="$(IMAGE_ARGS)" deploy/image-test.sh

# torch first and by its exact version: a CPU build that pip has at hand (PIP_FIND_LINKS, a local
# index) then satisfies it, and is not passed over for the build with CUDA.
$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV); torch is large, this takes a few minutes the first time"
	$(PIP) "$$(grep '^torch==' constraints.txt)"
	$(PIP) --editable '.[network,plots,pretrained]'
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(PIP) --editable '.[test]'
	touch $@

$(VENV)/.installed-check: $(VENV)/.installed
	$(PIP) --editable '.[check]'
	touch $@

$(OLDEST)/.installed: pyproject.toml constraints-oldest.txt
	test -x $(OLDEST)/bin/python || $(OLDEST_PYTHON) -m venv $(OLDEST)
	$(OLDEST_PIP) "$$(grep '^torch==' constraints-oldest.txt)"
	$(OLDEST_PIP) --editable '.[test]'
	touch $@

clean:
	rm -rf $(VENV) $(OLDEST) .mutants .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
