# `make help` lists the targets. What few readers need stands in make/*.mk.
SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c
PYTHON ?= python3.12
BIN := .venv/bin
REQUIREMENTS := requirements.txt

.PHONY: help setup demo test test-slow lint

help:  ## this list
	@sed -nE 's/^([a-z-]+):[^#]*## (.*)/\1\t\2/p' $(MAKEFILE_LIST) | awk -F '\t' '{printf "make %-18s%s\n", $$1, $$2}'

# Before anything is installed: one line, instead of what the shell says of a missing command.
BUILT := $(and $(wildcard .venv/installed),$(wildcard $(BIN)/python))
ifeq ($(BUILT)$(filter help,$(or $(MAKECMDGOALS),help)),)
ifneq ($(shell ("$(PYTHON)" -c "import sys; print(sys.version_info[:2] == (3, 12))") 2>/dev/null),True)
$(error PYTHON=$(PYTHON) is not Python 3.12; install it, or set its path: make PYTHON=/path/to/python3.12)
endif
endif

setup: .venv/installed  ## the environment .venv: two to four minutes

# A package without a wheel (promise) is built by the setuptools that requirements/build.txt names with its hash: in
# the isolation that is pip's default it would fetch the newest one, unchecked.
INSTALL = -m pip install --quiet --require-hashes
BUILD = $(INSTALL) --requirement requirements/build.txt
# What pip does, in a dozen lines instead of six hundred.
COUNTED = awk '/^Collecting/ && ++n % 20 == 0 {print n " packages fetched"; fflush()} \
  /^Installing/ {print "unpacking them, about a minute"; fflush()} /^ERROR/'

# The stamp is written last: an installation that broke off, or lost its programs, is begun anew.
.venv/installed: requirements/build.txt $(REQUIREMENTS) $(if $(BUILT),,again)
	"$(PYTHON)" -m venv $(if $(BUILT),,--clear) .venv
	$(BIN)/python $(BUILD)
	@echo "installing the $$(grep -c '^[a-z].*==' $(REQUIREMENTS)) packages of $(REQUIREMENTS) into .venv"
	$(BIN)/python $(subst --quiet,,$(INSTALL)) --no-build-isolation --requirement $(REQUIREMENTS) | $(COUNTED)
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

include make/tests.mk make/pages.mk make/site.mk make/environments.mk
