# make demo   build, and let the doctor look at the tiny checkpoint
# make test   build, install what the tests need, run every test
# The rest is for whoever changes a line: build asan fuzz neon bench docs fmt check clean.

PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python
PIP    := $(PY) -m pip --disable-pip-version-check install --quiet

CLANG        ?= $(firstword $(foreach c,clang clang-19 clang-18 clang-17 clang-16 clang-15 clang-14,$(shell command -v $(c) 2>/dev/null)))
CLANG_FORMAT ?= $(firstword $(foreach c,clang-format-14 clang-format,$(shell command -v $(c) 2>/dev/null)))
AARCH64_CC   ?= aarch64-linux-gnu-gcc
QEMU_AARCH64 ?= qemu-aarch64

C_FILES  := $(shell find csrc kernels/cpu -name '*.[ch]' -o -name '*.inc' -o -name '*.def')
C_CORE   := $(wildcard csrc/*.c kernels/cpu/*.c kernels/cpu/amx/*.c)
C_TESTS  := $(basename $(notdir $(wildcard tests/c/test_*.c)))
C_FLAGS  := -std=c11 -Wall -Wextra -Wpedantic -ffp-contract=off -iquote csrc -iquote kernels/cpu
C_LIBS   := -lm -lpthread
SANITIZE := -g -O1 -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer

.DEFAULT_GOAL := build
.SECONDARY:
.PHONY: demo test build test-c asan fuzz neon bench docs fmt check clean needs

demo: build
	$(VENV)/bin/fidelta doctor examples/tiny-qwen3_5

test: $(VENV)/test-installed test-c
	$(PY) -m pytest -q -n 2 --dist worksteal tests

build: $(VENV)/installed

# A stamp each: the environment, the package in it, what the tests need.
$(VENV)/made: .ci/needs
	@sh .ci/needs $(PYTHON)
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/installed: $(VENV)/made pyproject.toml setup.py $(C_FILES)
	$(PIP) --editable .
	@touch $@

# The package is in place, so this adds what its extra names; the constraints keep torch to its CPU build.
$(VENV)/test-installed: $(VENV)/installed constraints.txt
	$(PIP) --constraint constraints.txt "fidelta[test]"
	@touch $@

# The C core without Python, under the sanitizers where this compiler has them.
test-c: $(C_TESTS:%=build/c/%)
	@set -e; for t in $^; do $$t; done

build/c/flags: Makefile
	@mkdir -p build/c
	@if echo 'int main(void) { return 0; }' | $(CC) $(SANITIZE) -x c - -o build/c/probe 2>/dev/null && build/c/probe; \
	then echo "$(SANITIZE)"; else echo "-g -O1"; echo "$(CC) has no sanitizers here; the C tests run without" >&2; fi > $@

build/c/%.o: %.c build/c/flags $(C_FILES)
	@mkdir -p $(@D)
	$(CC) $(C_FLAGS) $$(cat build/c/flags) -c $< -o $@

build/c/test_%: tests/c/test_%.c $(C_CORE:%.c=build/c/%.o)
	$(CC) $(C_FLAGS) $$(cat build/c/flags) $^ -o $@ $(C_LIBS)

# Every kernel and the binding under the sanitizers. Left out: what measures resident memory, which the sanitizer itself
# fills, what reads generated files beside the package, and the doctor's hundred runs of the model.
asan: $(VENV)/test-installed test-c
	FIDELTA_SANITIZE=1 $(PY) setup.py --quiet build --build-base build/asan --build-lib build/asan/lib
	LD_PRELOAD="$$($(CC) -print-file-name=libasan.so) $$($(CC) -print-file-name=libstdc++.so)" \
	ASAN_OPTIONS=detect_leaks=0 PYTHONPATH=build/asan/lib $(PY) -m pytest -q -n 2 --dist worksteal tests -k "not no_leak" \
	--ignore tests/test_doctor.py --ignore tests/test_probes.py --ignore tests/test_docs.py

SECONDS_OF_FUZZING ?= 60
fuzz:
	@test -n "$(CLANG)" || { echo "make fuzz needs clang: apt-get install clang"; exit 1; }
	@mkdir -p build/c .fuzz
	$(CLANG) $(C_FLAGS) -g -O1 -fsanitize=fuzzer,address,undefined tests/c/fuzz_spec.c $(C_CORE) -o build/c/fuzz_spec $(C_LIBS)
	build/c/fuzz_spec -max_total_time=$(SECONDS_OF_FUZZING) -max_len=4096 .fuzz

# The NEON kernels, cross-compiled and run under an emulator.
neon:
	@command -v $(AARCH64_CC) >/dev/null || { echo "make neon needs a cross compiler: apt-get install gcc-aarch64-linux-gnu"; exit 1; }
	@command -v $(QEMU_AARCH64) >/dev/null || { echo "make neon needs an emulator: apt-get install qemu-user"; exit 1; }
	@mkdir -p build/neon
	@set -e; for t in $(C_TESTS); do set -x; \
	$(AARCH64_CC) $(C_FLAGS) -O2 -static tests/c/$$t.c $(C_CORE) -o build/neon/$$t $(C_LIBS); $(QEMU_AARCH64) build/neon/$$t; \
	{ set +x; } 2>/dev/null; done

bench: $(VENV)/test-installed
	$(PY) benchmarks/run.py

docs: $(VENV)/test-installed
	$(PY) -m fidelta.formats --write
	$(PY) docs/make_images.py

FORMATTED := $(filter-out csrc/formats.h,$(shell find csrc kernels/cpu tests/c -name '*.[ch]' -o -name '*.inc'))
fmt:
	@test -n "$(CLANG_FORMAT)" || { echo "make fmt needs clang-format: apt-get install clang-format"; exit 1; }
	$(CLANG_FORMAT) -i $(FORMATTED)

# What has to hold before a change goes in: warnings are errors under gcc and clang, and everything passes.
check:
	@set -e; for cc in gcc $(CLANG); do command -v $$cc >/dev/null || continue; \
	for f in $(C_CORE); do echo "$$cc $$f"; $$cc $(C_FLAGS) -Werror -O1 -fsyntax-only $$f; done; done
	@if [ -n "$(CLANG_FORMAT)" ]; then $(CLANG_FORMAT) --dry-run -Werror $(FORMATTED); fi
	$(MAKE) test
	$(MAKE) asan

clean:
	rm -rf build .fuzz $(VENV) python/*.egg-info python/fidelta/_core*.so
	find python tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
