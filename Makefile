PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test

demo: $(VENV)/.demo
	$(BIN)/python -m pyro_dp

test: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest --numprocesses 2

# One stamp per set of extras: the environment is remade when the pins or the package change.
$(VENV)/.demo: EXTRAS := demo
$(VENV)/.test: EXTRAS := demo,test,tutorials
$(VENV)/.demo $(VENV)/.test: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt "torch==2.13.0"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[$(EXTRAS)]"
	touch $@
