# Environments of their own, and the files of pinned packages.
.PHONY: demo-cuda card lm-eval fit-setup fit-check requirements requirements-tpu

# The packages bring CUDA 13 with them; the machine itself needs NVIDIA's driver, 580 or newer.
demo-cuda: .venv-cuda/installed  ## the main job on an NVIDIA GPU, in an environment of its own (2.5 GB; not run by us)
	.venv-cuda/bin/python 5_GRPO_Maxtext/grpo_llama3_1_8b_demo.py

card: .venv-cuda/installed  ## tries the course on your NVIDIA GPU, ten minutes; please send us the card.txt it writes
	.venv-cuda/bin/python 5_GRPO_Maxtext/tool.py card

.venv-cuda/installed: requirements/build.txt requirements/cuda.txt
	"$(PYTHON)" -m venv .venv-cuda
	$(call INSTALL,requirements/cuda.txt)
	touch $@

# --no-deps: the file is complete, and two of its packages contradict each other (requirements/tpu.overrides.txt)
.venv-vllm/installed: requirements/build.txt requirements/tpu.txt
	"$(PYTHON)" -m venv .venv-vllm
	$(call INSTALL,requirements/tpu.txt,--no-deps)
	touch $@

# MODEL: a folder that the tool convert_checkpoint made. TASK: a task of 5_GRPO_Maxtext/lm_eval/. The answers go into MODEL/lm_eval.
TASK ?= tiny_gsm8k
ifeq ($(filter lm-eval,$(MAKECMDGOALS))$(MODEL),lm-eval)
$(error MODEL is empty; give the folder that the tool convert_checkpoint made: make lm-eval MODEL=runs/mine_hf)
endif
lm-eval: .venv-eval/installed  ## an exported run, asked by EleutherAI's harness, in its own environment (6.2 GB): MODEL=runs/mine_hf
	.venv-eval/bin/lm-eval run --model hf --model_args pretrained=$(MODEL) \
	  --include_path 5_GRPO_Maxtext/lm_eval --tasks $(TASK) --apply_chat_template --batch_size 64 \
	  --log_samples --output_path $(MODEL)/lm_eval

# On Linux the package index has torch only with CUDA's libraries and Triton, 4 GB that a CPU does not need.
.venv-eval/installed: requirements/build.txt requirements/eval.txt
	"$(PYTHON)" -m venv .venv-eval
	$(call INSTALL,requirements/eval.txt)
	touch $@

# Needs no TPU and no GPU, but their compilers, each in an environment that borrows all else from .venv.
fit-setup: .venv-fit/installed .venv-fit-cards/installed  ## the compilers of TPUs and GPUs: does the job fit? 5_GRPO_Maxtext/docs/operate/tpu.md

# SINCE=2026-11-25 keeps what was compiled on that day or later, so that a broken-off run goes on.
FIT = 5_GRPO_Maxtext/tool.py fit_check SINCE=$(SINCE)
fit-check: fit-setup .venv-vllm/installed  ## compiles every row of the three large tables anew and writes their CSV files: some hours
	.venv-fit-cards/bin/python $(FIT) WRITE=fit_cards.csv
	.venv-vllm/bin/python $(FIT) WRITE=fit_check.csv
	.venv-fit/bin/python $(FIT) WRITE=fit_rungs.csv

.venv-fit/installed .venv-fit-cards/installed: .venv-%/installed: requirements/build.txt requirements/%.txt .venv/installed
	"$(PYTHON)" -m venv .venv-$*
	$(call INSTALL,requirements/$*.txt,--no-deps)
	echo "$(CURDIR)/.venv/lib/python3.12/site-packages" > .venv-$*/lib/python3.12/site-packages/default.pth
	touch $@

# Versions already in requirements.txt stay where they can. The set for a GPU comes last: requirements.txt constrains
# it, so what both hold has one version.
COMPILE = $(BIN)/uv pip compile --python-version 3.12 --generate-hashes --no-emit-index-url --quiet \
  --custom-compile-command "make $@"
requirements: setup  ## the files of pinned packages, after a change in pyproject.toml
	$(COMPILE) pyproject.toml --extra dev --universal --output-file $(REQUIREMENTS)
	$(COMPILE) --group build --constraint $(REQUIREMENTS) --universal --output-file requirements/build.txt
	$(COMPILE) --group fit --no-deps --constraint requirements/tpu.txt --universal --output-file requirements/fit.txt
	$(COMPILE) --group site --constraint $(REQUIREMENTS) --universal --output-file requirements/site.txt
	$(COMPILE) --group eval --universal --output-file requirements/eval.txt
	$(COMPILE) pyproject.toml --extra dev --group cuda --constraint $(REQUIREMENTS) --universal \
	  --output-file requirements/cuda.txt
	$(COMPILE) --group fit-cards --no-deps --constraint requirements/cuda.txt --universal \
	  --output-file requirements/fit-cards.txt

# Folder 5 on a TPU VM. libtpu's wheels ask for glibc 2.31.
requirements-tpu: setup  ## the same for a TPU, after a change in requirements/tpu.in
	$(COMPILE) requirements/tpu.in --overrides requirements/tpu.overrides.txt \
	  --python-platform x86_64-manylinux_2_31 --output-file requirements/tpu.txt
