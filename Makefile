# Everything happens inside this folder; `make help` lists what there is.
PYTHON ?= python3
# Two processes, on two GPUs or two cores (a minute and a half there); one if there is one GPU.
DEMO_PROCESSES = $$(.venv/bin/python -c "import torch; print(1 if torch.cuda.device_count() == 1 else 2)")
DEMO = .venv/bin/lockstep run jit --gpus $(DEMO_PROCESSES) --output_dir runs/demo --resume discard \
	--sample_data 2048 --model JiT-T/4 --img_size 16 --batch_size 32 --epochs 8 --lr 1e-3 \
	--warmup_epochs 1 --ema_decays 0.99 0.9 --num_workers 0 --sample_steps 20 --grid 32 \
	--num_fid_samples 64 --eval_interval 4 --save_interval 4 --log_interval 16

STAMP = .venv/.installed
# Tests wait a good deal, for processes and for SLURM: one process more than two cores run at once.
WORKERS = 3

# Caches of what the tests and the demo import stay in here too, not in HOME.
CACHES = XDG_CACHE_HOME="$(CURDIR)/.venv/.cache" MPLCONFIGDIR="$(CURDIR)/.venv/.cache/matplotlib"

# PyTorch's index of builds without CUDA libraries. Without it, pip takes a build of its own index.
CPU_BUILDS = https://download.pytorch.org/whl/cpu
# `make test-torch` leaves these out: what is not the core, and what does not depend on torch.
NOT_CORE = tests/recipes tests/slurm tests/gpu tests/chaos tests/test_benchmarks.py \
	tests/test_docs.py tests/test_examples.py

.DEFAULT_GOAL := help
.PHONY: help setup system test test-torch check demo clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

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

# The stamp of another torch: `%` is its version. It has no place in constraints.txt.
.venv-torch-%/.installed: pyproject.toml constraints.txt
	@echo "test-torch: installing torch $* and lockstep into $(@D); gigabytes, unless $(CPU_BUILDS) has it"
	@test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	@grep -v '^torch==' constraints.txt > $(@D)/constraints.txt
	@$(@D)/bin/python -m pip install -qq --disable-pip-version-check --no-cache-dir --retries 1 \
		--no-deps --index-url $(CPU_BUILDS) "torch==$*" 2>/dev/null || true
	@$(@D)/bin/python -m pip install -qq --disable-pip-version-check --no-cache-dir \
		-c $(@D)/constraints.txt "torch==$*" -e ".[all,test]"
	@touch $@

test-torch: $(VERSION:%=.venv-torch-%/.installed)  ## run the core's tests on another torch: make test-torch VERSION=2.15.0
	@test -n "$(VERSION)" || { echo "name the version: make test-torch VERSION=2.15.0"; exit 1; }
	@python=.venv-torch-$(VERSION)/bin/python; status=0; \
	torch="torch $$($$python -c 'import torch; print(torch.__version__)')"; \
	echo "test-torch: $$torch; left out: $(NOT_CORE)"; \
	$(subst /.venv/,/.venv-torch-$(VERSION)/,$(CACHES)) $$python -m pytest -n $(WORKERS) --dist worksteal src/lockstep tests \
		$(NOT_CORE:%=--ignore=%) || status=$$?; \
	if [ $$status -eq 0 ]; then echo "test-torch: passed on $$torch"; \
	else echo "test-torch: FAILED on $$torch (pytest exit code $$status)"; fi; \
	exit $$status

check: $(STAMP)  ## format, lint, types and tests: what every change must pass
	@./check

demo: $(STAMP)  ## train a small JiT on two processes (one if there is one GPU) and draw what it learned
	@$(CACHES) $(DEMO)

clean:  ## remove every .venv and whatever was built or cached here
	rm -rf .venv .venv-torch-* build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis src/*.egg-info
	find src tests recipes benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
