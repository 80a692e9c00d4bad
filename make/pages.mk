# What serves the pages: their tables, figures and comparisons.
.PHONY: figures pages page-pictures benchmark

figures: setup  ## committed tables and pictures anew where out of date: hours; STALE=True lists them, ONLY=path
	$(BIN)/python -m measure.run $(foreach name,ONLY STALE MARK PICTURES WORKERS MNIST_PATH,$(if $($(name)),$(name)=$($(name))))

pages: setup  ## fills the tables and the hosted course's links in all pages
	$(BIN)/python -m measure.tables

page-pictures: setup  ## the pictures of docs/learn/seeing_a_run.md, of a run with default constants: RUN=its folder
	SCREENSHOTS=5_GRPO_Maxtext/assets RUN=$(RUN) $(BIN)/python -m pytest tests/browser_page.py -k pictures

benchmark: setup  ## seconds per step against TRL: PEER=its Python, see the top of the script
	$(BIN)/python benchmarks/grpo_step_against_trl.py PEER=$(PEER)
