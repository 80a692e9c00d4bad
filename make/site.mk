# The page to touch, the course as a folder of HTML, and as notebooks. All three need an environment of their own.
.PHONY: playground playground-seeds site test-site notebooks test-notebooks

playground: .venv-site/installed  ## the page 5_GRPO_Maxtext/assets/playground.html, from playground/
	.venv-site/bin/python playground/build.py

playground-seeds: setup  ## how soon the playground trains to 80 % right, three seeds, in a browser
	TABLE=5_GRPO_Maxtext/assets/playground_seeds.csv $(BIN)/python -m pytest tests/browser_playground.py -k reaches

site: .venv-site/installed runs/seed_0/report.html  ## the course as static HTML in both languages: site/index.html
	@for language in en zh-TW; do NO_MKDOCS_2_WARNING=1 SITE_LANGUAGE=$$language .venv-site/bin/mkdocs build --quiet \
	--config-file tools/mkdocs.yml || exit; done
	@echo "site/index.html: $$(find site -name '*.html' | wc -l) pages, $$(du -sh site | cut -f1)"

test-site: site  ## links, widths, search and switches of the site, in a real browser
	.venv-site/bin/python -m pytest tests/browser_site.py

notebooks: .venv-site/installed  ## each script with its chapter's prose and pictures: notebooks/*.ipynb
	.venv-site/bin/python tools/notebooks.py notebooks

test-notebooks: .venv-site/installed  ## each notebook from the first to the last cell, with short runs
	.venv-site/bin/python -m pytest tests/notebook_runs.py

# The default run, whose page the site shows.
runs/seed_0/report.html: | .venv/installed
	$(BIN)/python 5_GRPO_Maxtext/grpo_llama3_1_8b_demo.py SEED=0 RUN_DIR=runs/seed_0

.venv-site/installed: requirements/build.txt requirements/site.txt .venv/installed
	"$(PYTHON)" -m venv .venv-site
	$(call INSTALL,requirements/site.txt)
	echo "$(CURDIR)/.venv/lib/python3.12/site-packages" > .venv-site/lib/python3.12/site-packages/default.pth
	touch $@
