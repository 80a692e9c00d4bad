# make demo    sets everything up and runs the main job: GRPO on a tiny Llama
# make demo-cuda    the same on an NVIDIA GPU, in an environment of its own (2.5 GB more; not run by us)
# make test    sets everything up and runs the tests
# make test-browser    the page of a run in a real browser (Debian's chromium and chromium-driver)
# make test-slurm    two processes of the main script under a real SLURM (Debian's slurm-wlm and munge)
# make test-vllm    generation by the real vLLM engine, on a CPU, in an environment of its own (about 12 GB)
# make lm-eval MODEL=runs/mine_hf    an exported run, evaluated by EleutherAI's harness, in an environment of its own (6.2 GB)
PYTHON ?= python3.12
BIN := .venv/bin
REQUIREMENTS := requirements.txt

# Before anything is installed: one line, instead of what the shell says of a missing command.
ifeq ($(wildcard .venv/installed),)
ifneq ($(shell ($(PYTHON) -c "import sys; print(sys.version_info[:2] == (3, 12))") 2>/dev/null),True)
$(error PYTHON=$(PYTHON) is not Python 3.12; install it, or set its path: make PYTHON=/path/to/python3.12)
endif
endif

.PHONY: setup demo demo-cuda test test-slow test-browser test-slurm page-pictures test-vllm lm-eval lint links figures benchmark fit-setup fit-check requirements requirements-tpu

setup: .venv/installed

# A package without a wheel (promise) is built by the setuptools that requirements-build.txt names with its hash: in
# the isolation that is pip's default it would fetch the newest one, unchecked.
INSTALL = -m pip install --quiet --require-hashes
BUILD = $(INSTALL) --requirement requirements-build.txt

# The stamp is written last: an installation that broke off is begun anew.
.venv/installed: requirements-build.txt $(REQUIREMENTS)
	$(PYTHON) -m venv .venv
	$(BIN)/python $(BUILD)
	$(BIN)/python $(INSTALL) --no-build-isolation --requirement $(REQUIREMENTS)
	touch $@

demo: setup
	$(BIN)/python 5_GRPO_Maxtext/grpo_llama3_1_8b_demo.py

# The packages bring CUDA 13 with them; the machine itself needs NVIDIA's driver, 580 or newer.
demo-cuda: .venv-cuda/installed
	.venv-cuda/bin/python 5_GRPO_Maxtext/grpo_llama3_1_8b_demo.py

.venv-cuda/installed: requirements-build.txt requirements-cuda.txt
	$(PYTHON) -m venv .venv-cuda
	.venv-cuda/bin/python $(BUILD)
	.venv-cuda/bin/python $(INSTALL) --no-build-isolation --requirement requirements-cuda.txt
	touch $@

test: setup
	$(BIN)/python -m pytest -m "not slow" --numprocesses 2 --dist loadfile

test-slow: setup
	$(BIN)/python -m pytest -m slow

# Installs nothing: without the browser, or before `make setup`, it says what is missing.
test-browser:
	@test -x $(BIN)/python || { echo "make test-browser needs .venv; run make setup first" >&2; exit 2; }
	@for program in chromium chromedriver; do command -v $$program > /dev/null || { echo "make test-browser \
	needs $$program; on Debian: apt-get install chromium chromium-driver" >&2; exit 2; }; done
	$(BIN)/python -m pytest tests/browser_page.py

# A SLURM of this machine alone, in a temporary folder; slurmd wants to be root. Installs nothing, as above.
test-slurm:
	@test -x $(BIN)/python || { echo "make test-slurm needs .venv; run make setup first" >&2; exit 2; }
	@for program in munged slurmctld slurmd sbatch; do command -v $$program > /dev/null || { echo "make test-slurm \
	needs $$program; on Debian: apt-get install slurm-wlm munge" >&2; exit 2; }; done
	$(BIN)/python -m pytest tests/slurm_job.py

# The pictures of the page in docs/seeing_a_run.md, of a run of the main script with its default constants: RUN=its folder
page-pictures: setup
	SCREENSHOTS=5_GRPO_Maxtext/assets RUN=$(RUN) $(BIN)/python -m pytest tests/browser_page.py -k pictures

test-vllm: .venv-vllm/installed
	.venv-vllm/bin/python -m pytest tests/vllm_engine.py

# --no-deps: the file is complete, and two of its packages contradict each other (requirements-tpu.overrides.txt)
.venv-vllm/installed: requirements-build.txt requirements-tpu.txt
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python $(BUILD)
	.venv-vllm/bin/python $(INSTALL) --no-deps --no-build-isolation --requirement requirements-tpu.txt
	touch $@

# MODEL: a folder that the tool convert_checkpoint made. TASK: a task of 5_GRPO_Maxtext/lm_eval/. The answers go into MODEL/lm_eval.
TASK ?= tiny_gsm8k
ifeq ($(filter lm-eval,$(MAKECMDGOALS))$(MODEL),lm-eval)
$(error MODEL is empty; give the folder that the tool convert_checkpoint made: make lm-eval MODEL=runs/mine_hf)
endif
lm-eval: .venv-eval/installed
	.venv-eval/bin/lm-eval run --model hf --model_args pretrained=$(MODEL) \
	  --include_path 5_GRPO_Maxtext/lm_eval --tasks $(TASK) --apply_chat_template --batch_size 64 \
	  --log_samples --output_path $(MODEL)/lm_eval

# On Linux the package index has torch only with CUDA's libraries and Triton, 4 GB that a CPU does not need.
# --no-deps: the file is complete, and pip would look beyond it for what it calls typepy[datetime].
.venv-eval/installed: requirements-build.txt requirements-eval.txt
	$(PYTHON) -m venv .venv-eval
	.venv-eval/bin/python $(BUILD)
	.venv-eval/bin/python $(INSTALL) --no-deps --no-build-isolation --requirement requirements-eval.txt
	touch $@

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check

# After a change in a script: the line numbers in the pages' links
links: setup
	$(BIN)/python benchmarks/line_links.py

# make figures, or make figures ONLY=1_Q_Learning: what runs, and how long it takes, stands in CONTRIBUTING.md
figures: setup
	$(BIN)/python benchmarks/figures.py $(ONLY)

# make benchmark PEER=/tmp/trl/bin/python: see the top of the script
benchmark: setup
	$(BIN)/python benchmarks/grpo_step_against_trl.py PEER=$(PEER)

# Does the 8 B job fit a TPU? Needs no TPU, but its compiler, in an environment that borrows all else from .venv.
fit-setup: .venv-fit/installed

# Compiles every row of both large tables anew and writes their CSV files: an hour and a half.
fit-check: fit-setup
	.venv-fit/bin/python 5_GRPO_Maxtext/tool.py tpu_fit_check WRITE=True
	.venv-fit/bin/python 5_GRPO_Maxtext/tool.py tpu_fit_check WRITE=True LARGEST=True

.venv-fit/installed: requirements-fit.txt .venv/installed
	$(PYTHON) -m venv .venv-fit
	.venv-fit/bin/python $(INSTALL) --requirement requirements-fit.txt
	echo "$(CURDIR)/.venv/lib/python3.12/site-packages" > .venv-fit/lib/python3.12/site-packages/default.pth
	touch $@

# After a change in pyproject.toml. Versions already in requirements.txt stay where they can.
# The set for a GPU comes last: requirements.txt constrains it, so what both hold has one version.
requirements: setup
	$(BIN)/uv pip compile pyproject.toml --extra dev --universal --python-version 3.12 --generate-hashes --no-emit-index-url \
	  --custom-compile-command "make requirements" --quiet --output-file $(REQUIREMENTS)
	$(BIN)/uv pip compile --group build --constraint $(REQUIREMENTS) --universal --python-version 3.12 --generate-hashes \
	  --no-emit-index-url --custom-compile-command "make requirements" --quiet --output-file requirements-build.txt
	$(BIN)/uv pip compile --group fit --universal --python-version 3.12 --generate-hashes --no-emit-index-url \
	  --custom-compile-command "make requirements" --quiet --output-file requirements-fit.txt
	$(BIN)/uv pip compile --group eval --universal --python-version 3.12 --generate-hashes --no-emit-index-url \
	  --custom-compile-command "make requirements" --quiet --output-file requirements-eval.txt
	$(BIN)/uv pip compile pyproject.toml --extra dev --group cuda --constraint $(REQUIREMENTS) --universal \
	  --python-version 3.12 --generate-hashes --no-emit-index-url \
	  --custom-compile-command "make requirements" --quiet --output-file requirements-cuda.txt

# After a change in requirements-tpu.in: folder 5 on a TPU VM. libtpu's wheels ask for glibc 2.31.
requirements-tpu: setup
	$(BIN)/uv pip compile requirements-tpu.in --overrides requirements-tpu.overrides.txt --python-version 3.12 \
	  --python-platform x86_64-manylinux_2_31 --generate-hashes --no-emit-index-url \
	  --custom-compile-command "make requirements-tpu" --quiet --output-file requirements-tpu.txt
