# install  a virtual environment in .venv with everything for development
# demo     the starter with real weights: a question answered in text, speech and an image; then a spoken question.
#          Without a network: demo-random, small checkpoints with random weights
# test     the tests, with coverage; those of the real starter run where its parts can be fetched
# lint     ruff and mypy
# review   the review tool on the whole tree; fails on findings of high severity
# bench    the benchmarks (BENCH="--quick" for a short run)

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c

VENV  := .venv
BIN   := $(VENV)/bin
STAMP := $(VENV)/.installed
OUT   := out
BENCH ?=

# Where CPU builds of torch are looked for first; without it, or where it cannot be reached, in pip's own indexes.
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu
# torchvision publishes no CPU build for this torch: its Python code is used without its extension.
TORCHVISION := torchvision==0.28.0

.PHONY: install demo demo-random demo-noise starter-for-tests test lint review format bench clean

install: $(STAMP)

$(BIN)/python:
	@for candidate in $(PYTHON) python3 python3.13 python3.12 python3.11; do \
	  if $$candidate -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null; then \
	    python=$$candidate; break; fi; \
	done; \
	if [ -z "$${python:-}" ]; then echo "error: Python 3.11, 3.12 or 3.13 is needed; set PYTHON=..." >&2; exit 1; fi; \
	echo "creating $(VENV) with $$($$python --version)"; \
	if ! $$python -m venv $(VENV); then \
	  echo "the venv module is incomplete here; using virtualenv"; \
	  rm -rf $(VENV); \
	  $$python -m pip install --quiet --target build/virtualenv virtualenv; \
	  PYTHONPATH=build/virtualenv $$python -m virtualenv $(VENV); \
	fi

# Without a GPU the pinned torch is installed first, so that no later step chooses another build.
$(STAMP): pyproject.toml starter/pyproject.toml constraints.txt | $(BIN)/python
	@if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi >/dev/null 2>&1; then \
	  echo "NVIDIA GPU found: installing with the torch that suits it"; \
	  $(BIN)/python -m pip install -e '.[dev,all]' -e ./starter; \
	else \
	  echo "no NVIDIA GPU: installing with the CPU torch of constraints.txt"; \
	  $(BIN)/python -m pip install -c constraints.txt \
	    $$($(BIN)/python tools/torch_index.py '$(TORCH_CPU_INDEX)') torch; \
	  $(BIN)/python -m pip install -c constraints.txt -e '.[dev,structured,diffusion,server,realtime,jwt,tracing]' -e ./starter; \
	  $(BIN)/python -m pip install --no-deps $(TORCHVISION); \
	fi
	@touch $@

define DEMO_MEDIA
import numpy as np, soundfile
from PIL import Image
t = np.arange(16000) / 16000
soundfile.write("$(OUT)/demo.wav", (0.3 * np.sin(2 * np.pi * 440 * t)).astype("float32"), 16000)
x = np.linspace(0, 255, 112).astype("uint8")
Image.fromarray(np.stack(np.broadcast_arrays(x[:, None], x[None], np.uint8(96)), -1)).save("$(OUT)/demo.png")
endef
export DEMO_MEDIA

# The tour exits with 3 where the model was not pulled; a pull that failed has printed why.
demo: $(STAMP)
	@mkdir -p $(OUT)
	@$(BIN)/omnistage pull starter || true
	@status=0; $(BIN)/python examples/starter_tour.py starter --out $(OUT) || status=$$?; \
	if [ $$status = 3 ]; then $(MAKE) --no-print-directory demo-random; else exit $$status; fi

demo-random: $(STAMP)
	@echo "No real weights here: running small checkpoints with random weights instead. They use the same code,"
	@echo "but their output is noise. With a network, run make demo again for the real weights."
	@mkdir -p $(OUT)
	@echo "$$DEMO_MEDIA" | $(BIN)/python -
	$(BIN)/omnistage tiny qwen2_5_omni $(OUT)/tiny-qwen2.5-omni --force
	$(BIN)/omnistage generate $(OUT)/tiny-qwen2.5-omni "What do you see and hear?" \
	  --image $(OUT)/demo.png --audio $(OUT)/demo.wav --modalities text,audio \
	  --max-tokens 24 --seed 0 --set talker.max_tokens=96 --out $(OUT) --trace
	$(BIN)/omnistage tiny flux $(OUT)/tiny-flux --force
	$(BIN)/omnistage generate $(OUT)/tiny-flux "A lighthouse at dusk" \
	  --width 128 --height 128 --steps 8 --seed 0 --out $(OUT) --trace
	@ls -l $(OUT)/answer.txt $(OUT)/answer.wav $(OUT)/picture.png
	@echo "The output above is noise: the weights are random."

demo-noise: demo-random

# Real weights for the tests marked real_weights, in the clone unless OMNISTAGE_HOME is set; without them those tests skip.
STARTER_HOME := $(or $(OMNISTAGE_HOME),$(CURDIR)/.starter)

starter-for-tests: $(STAMP)
	@if output=$$(OMNISTAGE_HOME='$(STARTER_HOME)' timeout 300 $(BIN)/omnistage pull starter 2>&1); then \
	  echo "$$output" | grep -A 9 '^starter:'; \
	else \
	  echo "the tests with the starter's real weights skip: $$(echo "$$output" | grep error: | tail -n 1)"; \
	fi

test: $(STAMP) starter-for-tests
	OMNISTAGE_HOME='$(STARTER_HOME)' PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -v -n auto --dist loadfile --no-loadscope-reorder -m "not gpu" -p tools.line_probes_plugin --durations=10 $(PYTEST)
	$(BIN)/coverage report --fail-under=85

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict omnistage omnistage_review starter/omnistage_starter
	$(BIN)/mypy --explicit-package-bases benchmarks tools

review: $(STAMP)
	@mkdir -p build
	$(BIN)/python tools/review_pr.py --tree . --fail-on high --export build/review.md --export build/review.sarif

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)
	$(BIN)/omnistage bench $(BENCH)

clean:
	rm -rf $(OUT) build dist .pytest_cache .mypy_cache .ruff_cache .coverage
