# `make help` lists the targets. What few readers need stands in make/*.mk.
SHELL := /bin/bash
PYTHON ?= python3.12
BIN := .venv/bin
REQUIREMENTS := requirements.txt

.PHONY: help setup demo test test-slow lint copies

help:  ## this list
	@sed -nE 's/^([a-z-]+):[^#]*## (.*)/\1\t\2/p' $(MAKEFILE_LIST) | awk -F '\t' '{printf "make %-18s%s\n", $$1, $$2}'

# Before anything is installed: one line, instead of what the shell says of a missing command.
BUILT := $(and $(wildcard .venv/installed),$(wildcard $(BIN)/python))
ifeq ($(BUILT)$(filter help,$(or $(MAKECMDGOALS),help)),)
ifneq ($(shell ("$(PYTHON)" -c "import sys; print(sys.version_info[:2] == (3, 12))") 2>/dev/null),True)
$(error PYTHON=$(PYTHON) is not Python 3.12; install it, or set its path: make PYTHON=/path/to/python3.12)
endif
endif

setup: .venv/installed  ## the environment .venv: 20 seconds on a fast connection

# pip installs uv, and uv installs the rest in a tenth of pip's time. uv doesn't read pip's settings,
# so it's told the index, if one is set there. A package without a wheel (promise) is built by the
# setuptools of requirements/build.txt: in isolation, the newest one would build it, unchecked.
# $(1): the file of packages; $(2): more options
define INSTALL
$(@D)/bin/python -m pip install --quiet --require-hashes --requirement requirements/build.txt
@echo "installing the $$(grep -c '^[a-z].*==' $(1)) packages of $(1) into $(@D)"
@index=$$($(@D)/bin/python -m pip config list | sed -nE "s/^[^.]*\.index-url='(.*)'$$/\1/p" | head -1); \
UV_DEFAULT_INDEX="$${UV_DEFAULT_INDEX:-$$index}" $(@D)/bin/uv pip install --quiet \
  --python $(@D)/bin/python --require-hashes --no-build-isolation $(2) --requirement $(1) || \
  { echo "uv can't install them; README.md says how pip does it, under Setting up" >&2; exit 1; }
endef

# The stamp is written last: an installation that broke off, or lost its programs, is begun anew.
.venv/installed: requirements/build.txt $(REQUIREMENTS) $(if $(BUILT),,again)
	"$(PYTHON)" -m venv $(if $(BUILT),,--clear) .venv
	$(call INSTALL,$(REQUIREMENTS))
	touch $@

.PHONY: again
again:

demo: setup  ## sets everything up and runs the main job: GRPO on a tiny Llama
	$(BIN)/python 5_GRPO_Maxtext/grpo_llama3_1_8b_demo.py

test: setup  ## sets everything up and runs the tests
	$(BIN)/python -m pytest -m "not slow" --numprocesses 2 --dist loadfile

test-slow: setup  ## the tests that take minutes each; rebuilds the tiny Llama and compares it byte by byte
	$(BIN)/python -m pytest -m slow

lint: setup  ## ruff check and ruff format --check
	$(BIN)/ruff check
	$(BIN)/ruff format --check

# A numbered folder stands alone, so it has its own copy of these files. Edit them in folder 2.
copies:  ## settings.py, runs.py and grader.py of folder 2, copied into the other folders
	cd 2_Cart_Pole_DQN && cp settings.py grader.py ../1_Q_Learning
	cd 2_Cart_Pole_DQN && cp settings.py grader.py runs.py ../3_Pendulum
	cd 2_Cart_Pole_DQN && cp settings.py grader.py runs.py ../4_GRPO_MNIST
	cd 2_Cart_Pole_DQN && cp grader.py ../5_GRPO_Maxtext/tools/exercises

include make/tests.mk make/pages.mk make/site.mk make/environments.mk
