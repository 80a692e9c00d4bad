# make demo    sets everything up and runs the main job: GRPO on a tiny Llama
# make test    sets everything up and runs the tests
PYTHON ?= python3.12
BIN := .venv/bin
REQUIREMENTS := requirements.txt

.PHONY: setup demo test test-slow lint benchmark requirements

setup: .venv/installed

# The stamp is written last: an installation that broke off is begun anew.
.venv/installed: $(REQUIREMENTS)
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --require-hashes --requirement $(REQUIREMENTS)
	touch $@

demo: setup
	$(BIN)/python 5_GRPO_Maxtext/grpo_llama3_1_8b_demo.py

test: setup
	$(BIN)/python -m pytest -m "not slow"

test-slow: setup
	$(BIN)/python -m pytest -m slow

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check

# make benchmark PEER=/tmp/trl/bin/python: see the top of the script
benchmark: setup
	$(BIN)/python benchmarks/grpo_step_against_trl.py PEER=$(PEER)

# After a change in pyproject.toml. Versions already in requirements.txt stay where they can.
requirements: setup
	$(BIN)/uv pip compile pyproject.toml --extra dev --universal --python-version 3.12 --generate-hashes --no-emit-index-url \
	  --custom-compile-command "make requirements" --quiet --output-file $(REQUIREMENTS)
