# Tests that need a program or an environment of their own.
.PHONY: test-isa test-browser test-slurm test-vllm mutants

test-isa: setup  ## the tests as other processors compile them: six settings, more than an hour
	$(BIN)/python tests/isa.py

# Installs nothing: without the browser, or before `make setup`, it says what is missing.
test-browser:  ## the page of a run, and the playground, in a real browser (Debian's chromium and chromium-driver)
	@test -x $(BIN)/python || { echo "make test-browser needs .venv; run make setup first" >&2; exit 2; }
	@for program in chromium chromedriver; do command -v $$program > /dev/null || { echo "make test-browser \
	needs $$program; on Debian: apt-get install chromium chromium-driver" >&2; exit 2; }; done
	$(BIN)/python -m pytest tests/browser_page.py tests/browser_playground.py

# A SLURM of this machine alone, in a temporary folder; slurmd wants to be root. Installs nothing, as above.
test-slurm:  ## two processes of the main script under a real SLURM (Debian's slurm-wlm and munge)
	@test -x $(BIN)/python || { echo "make test-slurm needs .venv; run make setup first" >&2; exit 2; }
	@for program in munged slurmctld slurmd sbatch; do command -v $$program > /dev/null || { echo "make test-slurm \
	needs $$program; on Debian: apt-get install slurm-wlm munge" >&2; exit 2; }; done
	$(BIN)/python -m pytest tests/slurm_job.py

test-vllm: .venv-vllm/installed  ## generation by the real vLLM engine, on a CPU, in an environment of its own (12 GB)
	.venv-vllm/bin/python -m pytest tests/vllm_engine.py

mutants:  ## puts one-line faults into a copy and shows which of them the tests catch: 30 minutes
	$(BIN)/python tests/mutants.py
