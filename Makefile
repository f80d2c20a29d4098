# Two commands: `make demo` runs the main job, `make test` the whole suite; each installs what is missing.
#   make demo WITHOUT_RENDERER=1   without a Vulkan device
#   make demo KEEP=1               leaves the pages up afterwards
#   make test ARGS='tests/storage -x'
#   make test TOGETHER=           one process instead of two

# Tests on the platform wait much: the others run beside them in a second process.
TOGETHER = -n 2 --no-loadscope-reorder

.PHONY: demo test test-interop lint format install renderer browser

demo: install $(if $(WITHOUT_RENDERER),,renderer)
	@.venv/bin/joynexus demo $(if $(WITHOUT_RENDERER),--without-renderer) $(if $(KEEP),--keep)

# Tests that need a renderer or a browser skip with the reason where neither can be had; LIBERO's install it and fail.
test: install
	@scripts/renderer.sh || true
	@scripts/browser.sh || true
	@scripts/libero.sh || true
	@.venv/bin/python -m pytest $(TOGETHER) $(ARGS)

# Datasets written here in the real lerobot, and its datasets here: its own virtual environment, 6 GB.
test-interop: install
	@scripts/interop.sh
	@.venv/bin/python -m pytest tests_interop $(ARGS)

lint: install
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .
	@.venv/bin/mypy

format: install
	@.venv/bin/ruff check --fix .
	@.venv/bin/ruff format .

install:
	@scripts/setup.sh

renderer: install
	@scripts/renderer.sh

browser:
	@scripts/browser.sh
