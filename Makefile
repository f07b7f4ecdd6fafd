# Everything happens inside this folder; `make help` lists what there is.
PYTHON ?= python3
# Two processes, on GPUs if there are any, else on two cores; a minute and a half there.
DEMO = .venv/bin/lockstep run jit --gpus 2 --output_dir runs/demo --resume discard \
	--sample_data 2048 --model JiT-T/4 --img_size 16 --batch_size 32 --epochs 8 --lr 1e-3 \
	--warmup_epochs 1 --ema_decays 0.99 0.9 --num_workers 0 --sample_steps 20 --grid 32 \
	--num_fid_samples 64 --eval_interval 4 --save_interval 4 --log_interval 16

STAMP = .venv/.installed
# Tests wait a good deal, for processes and for SLURM: one process more than two cores run at once.
WORKERS = 3

# Caches of what the tests and the demo import stay in here too, not in HOME.
CACHES = XDG_CACHE_HOME="$(CURDIR)/.venv/.cache" MPLCONFIGDIR="$(CURDIR)/.venv/.cache/matplotlib"

.DEFAULT_GOAL := help
.PHONY: help setup system test check demo clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-6s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP)  ## install lockstep and all it needs into .venv (once)
	@echo "setup: .venv is ready"

# The only target that changes anything outside this folder.
system:  ## install by apt, as root, what some tests need: SLURM and network namespaces
	@./.ci/system

# The stamp is written last, so an interrupted set-up is taken up again.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "lockstep needs Python 3.11 or newer; name one: make setup PYTHON=python3.12"; exit 1; }
	@echo "setup: installing lockstep with every extra into .venv; 1 to 5 minutes the first time"
	@test -x .venv/bin/python || $(PYTHON) -m venv .venv
	@.venv/bin/python -m pip install -qq --disable-pip-version-check --no-cache-dir \
		-c constraints.txt -e ".[all,test]"
	@touch $@

test: $(STAMP)  ## run the whole test suite
	@start=$$(date +%s); status=0; \
	$(CACHES) .venv/bin/python -m pytest -n $(WORKERS) --dist worksteal || status=$$?; \
	seconds=$$(($$(date +%s) - start)); \
	if [ $$status -eq 0 ]; then echo "test: passed in $$seconds s"; \
	else echo "test: FAILED after $$seconds s (pytest exit code $$status)"; fi; \
	exit $$status

check: $(STAMP)  ## format, lint, types and tests: what every change must pass
	@./check

demo: $(STAMP)  ## train a small JiT on two processes and draw what it learned
	@$(CACHES) $(DEMO)

clean:  ## remove .venv and whatever was built or cached here
	rm -rf .venv build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis src/*.egg-info
	find src tests recipes benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
