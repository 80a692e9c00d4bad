# What serves the pages: their links, figures and comparisons.
.PHONY: figures page-pictures benchmark

# ONLY=1_Q_Learning, or ONLY=--list for every command and its minutes
figures: setup  ## every committed CSV file and picture anew: hours; ONLY=1_Q_Learning, ONLY=--list
	$(BIN)/python tools/figures.py $(ONLY)

page-pictures: setup  ## the pictures of docs/seeing_a_run.md, of a run with default constants: RUN=its folder
	SCREENSHOTS=5_GRPO_Maxtext/assets RUN=$(RUN) $(BIN)/python -m pytest tests/browser_page.py -k pictures

benchmark: setup  ## seconds per step against TRL: PEER=its Python, see the top of the script
	$(BIN)/python benchmarks/grpo_step_against_trl.py PEER=$(PEER)
