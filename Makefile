# Everything runs in .venv, made on first use from the exact versions of requirements.lock.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INTEGRATIONS := build/integrations
STAMP := $(VENV)/.installed
PORT ?= 8501
WORKERS ?= 3
SECONDS ?= 60
SEED ?= 1
LEVELS ?= --all
UNIT := "not attack and not browser and not documentation and not integration"
# Hundreds of processes that tests start import compiled files, whatever the environment says.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: run test test-browser test-integrations lint types kernels fuzz crash bench bench-quick gpu sample screenshots docs reference house wheel release clean help

help:  ## Show what can be made
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 16

$(STAMP): requirements.lock pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Inshrink needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --requirement requirements.lock
	$(BIN)/python -m pip install --quiet --no-deps --editable .
	@touch $@

run: $(STAMP)  ## Open the explorer on the bundled sample run at http://localhost:8501
	$(BIN)/inshrink ui sample_checkpoints/digits-cnn --port $(PORT)

lint: $(STAMP)  ## Check style and layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(STAMP)  ## Check types
	$(BIN)/mypy

kernels: $(STAMP)  ## Compile the kernels, so that not every test worker does
	$(BIN)/python -m inshrink_core.ops
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q tests/codecs -k test_encoder_and_decoder_reach_the_same_state

test: $(STAMP)  ## Run lint, types and the test suite, but for the parts below
	$(MAKE) --jobs 2 lint types kernels
	# Some tests wait for other processes, and a busy machine is late at times: tests that fail run once more, alone.
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal -m $(UNIT) \
		|| $(BIN)/python -m pytest -m $(UNIT) --last-failed --last-failed-no-failures none

test-browser: $(STAMP)  ## Drive the explorer in headless Chromium
	$(BIN)/python -m pytest -m browser tests/app || $(BIN)/python -m pytest -m browser tests/app --last-failed

test-integrations: LEVELS :=  # of this processor alone
test-integrations: wheel  ## Test the adapters with the real libraries, installed with the wheel's extras in build/integrations
	$(PYTHON) -m venv $(INTEGRATIONS)
	$(INTEGRATIONS)/bin/python -m pip install --quiet --constraint requirements.lock \
		"$$(ls -t dist/inshrink-*.whl | head -1)[hf,hub,lightning,mlflow,ray,remote,wandb]" "ray[train]" peft pytest \
		pytest-timeout hypothesis tyro
	# A server of S3, apart: under the constraints pip tries hundreds of versions.
	$(INTEGRATIONS)/bin/python -m pip install --quiet "moto[server]"
	# Of what torchtitan asks for, its checkpoint manager needs these.
	$(INTEGRATIONS)/bin/python -m pip install --quiet --no-deps torchtitan==0.3.0 spmd_types==0.2.3 torchdata==0.11.0
	$(INTEGRATIONS)/bin/python -m pip install --quiet --no-deps --force-reinstall "$$(ls -t dist/inshrink-*.whl | head -1)"
	# Azure's server is a package of npm; without npm its tests are skipped.
	! command -v npm >/dev/null || npm install --silent --no-audit --no-fund --prefix $(INTEGRATIONS)/azurite azurite
	AZURITE_BLOB=$(CURDIR)/$(INTEGRATIONS)/azurite/node_modules/.bin/azurite-blob \
		$(INTEGRATIONS)/bin/pytest -o pythonpath= -m integration tests/integrations

fuzz: $(STAMP)  ## Attack archives, inputs and decoders for a minute
	$(BIN)/python -m pytest -q -m attack tests/fuzz
	$(BIN)/python -m benchmarks.fuzz $(SECONDS) --seed $(SEED)

crash: $(STAMP)  ## Kill every verb at random system calls, fail its writes, cut its power; SCHEDULES=100000 of parts
	$(BIN)/python -m pytest -q -m attack tests/crash
	$(BIN)/python -m benchmarks.crash $(SECONDS)
	$(if $(SCHEDULES),$(BIN)/python -m benchmarks.crash --schedules $(SCHEDULES))

bench: $(STAMP)  ## Run every benchmark and write benchmarks/results/*.csv
	$(BIN)/python -m benchmarks.run

bench-quick: $(STAMP)  ## The benchmarks that end within ten minutes
	$(BIN)/python -m benchmarks.run --quick

gpu: $(STAMP)  ## Test the kernels on a GPU, and write benchmarks/results/gpu.csv
	$(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available() and "there is no CUDA device here")'
	$(BIN)/python -m pytest -q -m gpu tests
	$(BIN)/python -m benchmarks.gpu

sample: $(STAMP)  ## Train the bundled sample run anew (changes its files)
	$(BIN)/python sample_checkpoints/make_digits_cnn.py

screenshots: $(STAMP)  ## Take the screenshots of README and docs from the running explorer
	$(BIN)/python -m benchmarks.figure
	$(BIN)/python -m benchmarks.screenshots

docs: $(STAMP)  ## Build the documentation site into build/site, every warning an error; run what its pages say
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	$(BIN)/python -m pytest --quiet --numprocesses 2 -m documentation \
		tests/docs tests/*/test_*_guide.py tests/verbs/test_parts.py

reference: $(STAMP)  ## Write the derived parts of docs and the schema of JSON documents anew
	$(BIN)/python -m benchmarks.reference

house: $(STAMP)  ## Print the size of the code beside the limits of benchmarks/house.toml; fails above one
	$(BIN)/python -m benchmarks.house

wheel: $(STAMP)  ## Build the wheel into dist/, with the machine code of all kernels for this Python
	$(BIN)/python -m inshrink_core.ops $(LEVELS)
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .

release: $(STAMP)  ## Check version and changelog, build wheel and sdist, try both; CONFIRM=yes tags the commit
	$(BIN)/python .ci/release.py $(if $(filter yes,$(CONFIRM)),--tag)

clean:  ## Remove the environment and everything built
	rm -rf $(VENV) build dist *.egg-info inshrink_core/ops/machine .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
