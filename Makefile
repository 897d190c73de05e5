# Two commands: `make lab` opens the course, `make test` proves it.  `make help` lists the rest.
# PYTHON=python3.13 picks the Python that .venv is made with; without it the first that fits is used.

PYTHON   =
LAB_ARGS =
TEST_ARGS =
LOCK_ARGS =
SUBMISSIONS =
GRADES   = grades
SITE_URL =

BIN := .venv/bin
# In a container one is often root, and Jupyter then wants to hear that it is meant.
AS_ROOT = $(if $(filter 0,$(shell id -u)),--allow-root)
export UV_PYTHON_DOWNLOADS = never
export UV_SYSTEM_CERTS = 1
# The kernel of this environment, even where the user has another one called python3.
export JUPYTER_PREFER_ENV_PATH = 1
unexport JUPYTER_PATH

.PHONY: help lab test notebooks exercises reference site animation grade test-gpu record bench lint lock env clean
.DEFAULT_GOAL := help

help: ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' Makefile

lab: env ## set up, then open JupyterLab on the start notebook (LAB_ARGS="--no-browser --port 8890")
	@JUPYTER_CONFIG_PATH="$(CURDIR)/tools/jupyter/plain" $(BIN)/jupyter lab $(AS_ROOT) \
	    --LabApp.default_url=/lab/tree/notebooks/00_start_here.ipynb $(LAB_ARGS)

test: env ## set up, then run every test and every notebook (TEST_ARGS="-k traffic")
	@$(BIN)/python -m pytest $(TEST_ARGS)

notebooks: env ## execute all notebooks and write them back in their normal form
	@$(BIN)/python tools/notebooks.py

exercises: env ## make exercises/ from solutions/ again
	@$(BIN)/python tools/exercises.py

reference: env ## make docs/glossary.md and docs/cheat_sheet.md from the library again
	@$(BIN)/python tools/reference.py

site: env ## build the web edition into build/site (SITE_URL=https://where.it/will/be)
	@SITE_URL="$(SITE_URL)" $(BIN)/python tools/build_site.py
	@echo "To look at it: $(BIN)/python -m http.server -d build/site"

animation: env ## make the README's moving picture again, from the loop's trace
	@$(BIN)/python tools/readme_animation.py

grade: env ## grade a folder of notebooks (SUBMISSIONS=folder GRADES=grades)
	@[ -n "$(SUBMISSIONS)" ] || { echo "make grade: which folder? make grade SUBMISSIONS=folder" >&2; exit 2; }
	@$(BIN)/python tools/grade.py "$(SUBMISSIONS)" --grades "$(GRADES)"

test-gpu: env ## on a machine with a GPU, CuPy and torch: the kernels' tests, and the GPU notebooks live
	@$(BIN)/python -m pytest tests/test_gpu.py tests/test_gpu_hopper.py \
	    tests/test_gpu_gradients.py tests/test_gpu_decoding.py tests/test_gpu_autograd.py tests/test_ex13_17.py tests/test_show_gpu_bench.py
	@$(BIN)/python -m pytest -o addopts= --nbval-lax --nbval-current-env --nbval-cell-timeout=600 \
	    notebooks/1[4-9]_*.ipynb notebooks/2*.ipynb

RECORDINGS = attention_lib/gpu/recordings
record: env ## on such a machine with Nsight Compute and compute-sanitizer: make all GPU recordings again
	@$(BIN)/python -m attention_lib.gpu.bench --out $(RECORDINGS)/bench.json
	@$(BIN)/python -m attention_lib.gpu.counters --out $(RECORDINGS)/counters.json
	@$(BIN)/python -m attention_lib.gpu.sanitize --out $(RECORDINGS)/sanitizer.json
	@$(BIN)/python -m attention_lib.gpu.bench_decode --out $(RECORDINGS)/decode.json
	@$(BIN)/python -m attention_lib.gpu.train --out $(RECORDINGS)/train.json
	@$(BIN)/python tools/record_gpu.py attention_lib/recordings

bench: env ## print this machine's time and memory ratios
	@$(BIN)/python tools/bench.py

lint: env ## check the style of code and notebooks
	@$(BIN)/ruff check .

lock: env ## resolve requirements.lock again from pyproject.toml (LOCK_ARGS=--upgrade for newer versions)
	@uv=$$(command -v uv || echo $(BIN)/uv); $$uv pip compile pyproject.toml --extra dev \
	    --universal --python-version 3.11 --generate-hashes --no-annotate --quiet \
	    --no-config --no-emit-index-url --no-emit-find-links \
	    --custom-compile-command "make lock" $(LOCK_ARGS) -o requirements.lock

env: ## make or update .venv; does nothing if it is up to date
	@sh tools/env.sh "$(PYTHON)"

clean: ## remove .venv and every cache
	@rm -rf .venv .pytest_cache .ruff_cache .hypothesis build dist
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
	@find . -name .ipynb_checkpoints -type d -prune -exec rm -rf {} +
