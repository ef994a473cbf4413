# make demo   trains a small DeepSeek-shaped model with its activations placed on the host
# make test   runs the tests
# make parity compares every family of models with transformers (needs PyTorch, which it installs)
# All make their own virtual environment first and do nothing twice. PYTHON=python3.13 picks another interpreter.

PYTHON ?= python3
VENV ?= $(if $(filter python3,$(PYTHON)),.venv,.venv-$(notdir $(PYTHON)))
BIN := $(VENV)/bin
# One directory a run, so that neither a second demo nor an old result stands in the way.
OUT ?= runs/$(shell date +%Y-%m-%d-%H%M%S)

.PHONY: demo test parity clean
.DELETE_ON_ERROR:

demo: $(VENV)/.installed-train
	$(BIN)/overspill train --out $(OUT)

test: $(VENV)/.installed-test $(VENV)/.tried-gpu-compile
	$(BIN)/python -m pytest -n 2 --dist worksteal --ignore=tests/parity $(ARGS)

parity: $(VENV)/.installed-parity
	OVERSPILL_PARITY=1 $(BIN)/python -m pytest -n 2 --dist worksteal tests/parity $(ARGS)

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Overspill needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1). Try PYTHON=python3.12 make ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -qq --upgrade pip
	@touch $@

# An editable install follows the sources by itself; only the packaging asks for another one.
$(VENV)/.installed-%: pyproject.toml $(VENV)/.python
	$(BIN)/python -m pip install -qq --editable '.[$*]'
	@touch $@

# Tests that compile for GPUs need a compiler for them, but no GPU; where it can't be had, they are skipped.
$(VENV)/.tried-gpu-compile: $(VENV)/.installed-test
	@$(BIN)/python -m pip install -qq --editable '.[gpu-compile]' || echo "no compiler for GPUs can be installed here: tests that need one are skipped"
	@touch $@

clean:
	rm -rf .venv .venv-* build dist *.egg-info
