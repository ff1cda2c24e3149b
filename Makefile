PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# Otherwise each worker would compile all tests again.
export PYTHONDONTWRITEBYTECODE :=

# Idle BLAS threads of two workers would spin on two cores.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist worksteal

INSTALL := pip install --quiet

.PHONY: demo docs lint quick test test-ci test-all test-lowest browser release slides tutorials

demo: $(VENV)/.demo
	$(BIN)/python -m pyro_dp

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tests/prose.py & $(BIN)/mypy; status=$$?; wait $$! && exit $$status

# Four commands: one case of each test and no fits; also the fits, and all quick cases; a fourth of all
# cases and of the slow tests, where the next commit takes another fourth; everything.
TURN := $(shell git rev-list --count HEAD 2>/dev/null || echo 0)

quick: lint
	$(PYTEST) --rung quick

test: lint
	$(PYTEST) --rung test

# .ci/run calls it.
test-ci: lint
	$(PYTEST) --rung ci --turn $(TURN)

test-all: lint
	$(PYTEST)

# axe-core, for the slow tests of the report and the site. They also need Chromium: apt-get install chromium.
browser:
	npm install --no-audit --no-fund --no-package-lock --prefix tests/browser

# The site, in build/site/index.html. Any warning of Sphinx is an error.
docs: $(VENV)/.docs
	$(BIN)/python -m sphinx --quiet --fresh-env --fail-on-warning --keep-going -c docs . build/site

# sdist and wheel of the last commit, checked and used, in dist/.
release:
	PYTHON=$(PYTHON) .ci/release

# The slides of the first lesson and the cheat sheet, as PDF.
slides: $(VENV)/.test docs
	$(BIN)/python docs/slides.py
	$(BIN)/python docs/cheat_sheet.py

# Run the tutorials and renew their outputs.
tutorials: $(VENV)/.test
	OMP_NUM_THREADS=1 $(BIN)/python -m nbconvert --to notebook --execute --inplace \
		--ExecutePreprocessor.record_timing=False tutorials/*.ipynb

# The core tests on the oldest Python and the lowest versions that pyproject.toml allows; .ci/run calls
# it. A few cases suffice here, because old versions fail in their calls rather than in their numbers.
LOWEST := .venv-lowest
OLDEST ?= python3.10
CORE := \
	tests/accounting/test_accounting.py \
	tests/mechanism/test_clipping.py \
	tests/methods/test_dpem.py \
	tests/accounting/test_pld.py \
	tests/vips/test_vips_models.py \
	tests/tabular/test_bad_frames.py \
	tests/tabular/test_declarations.py \
	tests/infer/test_traced_step.py::test_a_record_on_which_the_model_fails_counts_as_zero \
	tests/infer/test_traced_step.py::test_compiled_equals_pyro_code

test-lowest: $(LOWEST)/.test
	OMP_NUM_THREADS=1 $(LOWEST)/bin/python -m pytest -p no:cacheprovider --numprocesses 2 \
		--dist worksteal --rung ci --turn $(TURN) $(CORE)

$(LOWEST)/.test: pyproject.toml $(LOWEST)/.pins
	$(LOWEST)/bin/python -m $(INSTALL) --constraint constraints-lowest.txt --editable ".[test]"
	touch $@

# These do not need the package, so they are installed while $(VENV) is made.
$(LOWEST)/.pins: constraints-lowest.txt
	$(OLDEST) -m venv --clear $(LOWEST)
	$(LOWEST)/bin/python -m pip install --quiet --upgrade pip
	$(LOWEST)/bin/python -m $(INSTALL) --requirement constraints-lowest.txt
	touch $@

# One stamp per set of extras. The environment is made again when the pins or pyproject.toml change.
$(VENV)/.demo: EXTRAS := demo
$(VENV)/.docs: EXTRAS := docs
$(VENV)/.test: EXTRAS := demo,docs,test,tutorials
$(VENV)/.demo $(VENV)/.docs $(VENV)/.test: pyproject.toml constraints.txt
	@echo "Installing pyro_dp and its $(EXTRAS) packages in $(VENV). This takes minutes, once."
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m $(INSTALL) --constraint constraints.txt "torch==2.13.0"
	$(BIN)/python -m $(INSTALL) --constraint constraints.txt --editable ".[$(EXTRAS)]"
	touch $@
