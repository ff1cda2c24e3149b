PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# Idle BLAS threads of two workers would spin on two cores.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist worksteal

.PHONY: demo lint test test-all

demo: $(VENV)/.demo
	$(BIN)/python -m pyro_dp

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

test: lint
	$(PYTEST) -m "not slow"

# With what is marked slow: .ci/run calls it.
test-all: lint
	$(PYTEST)

# One stamp per set of extras: the environment is remade when the pins or the package change.
$(VENV)/.demo: EXTRAS := demo
$(VENV)/.test: EXTRAS := demo,test,tutorials
$(VENV)/.demo $(VENV)/.test: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt "torch==2.13.0"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[$(EXTRAS)]"
	touch $@
