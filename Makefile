# `make install` once, then `make test`. Every target makes the virtual environment if it is missing.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# The console script is written last by pip: it stands for a finished installation.
INSTALLED := $(BIN)/abcrown-dist

.PHONY: install test test-all test-huge check benchmark benchmark-sharding benchmark-bab standin stress clean

install: $(INSTALLED)

$(INSTALLED): setup.py pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --editable ".[test]"
	touch $@

# Unit tests, without those marked slow.
test: $(INSTALLED)
	$(BIN)/python -m pytest -m "not slow and not huge"

test-all: $(INSTALLED)
	$(BIN)/python -m pytest -m "not huge"

# Widths of the sharding benchmark; the better part of an hour on two cores.
test-huge: $(INSTALLED)
	$(BIN)/python -m pytest -m huge

# Random runs of the program on several ranks, a tenth of which lose one: half an hour. RUNS=20 SEED=7: fewer, others.
stress: $(INSTALLED)
	$(BIN)/python -m tests.stress.stress --runs $(or $(RUNS),200) --seed $(or $(SEED),0)

# Style, types, and the direction of imports.
check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_layers.py

# BENCH=DIR ORACLE=DIR: real networks and a reference's bounds on them, see benchmarks/bounds.py.
benchmark: $(INSTALLED)
	$(BIN)/python benchmarks/startup.py
	$(BIN)/python benchmarks/bounds.py $(if $(BENCH),--bench "$(BENCH)") $(if $(ORACLE),--oracle "$(ORACLE)")
	$(BIN)/python benchmarks/vnnlib_parse.py

# The tables of docs/sharding_figures.md: the better part of an hour, and 16 GiB of memory.
# SHARDING="--quick" takes two minutes.
benchmark-sharding: $(INSTALLED)
	$(BIN)/python benchmarks/sharding.py $(SHARDING)

# Branch and bound on P = 1, 2, 4 ranks; needs cores that nothing else uses. BAB="--quick" takes two minutes.
benchmark-bab: $(INSTALLED)
	$(BIN)/python benchmarks/bab_scaling.py $(BAB)

# The network and property of configs/cifar100_resnet_large_standin.yaml.
standin: $(INSTALLED)
	$(BIN)/python examples/cifar100_resnet_large.py

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
