#!/usr/bin/env bash
# The one test command: ruff, mypy --strict, pytest.
#   ./launch/test.sh [PYTEST ARGUMENTS]     e.g. ./launch/test.sh tests/losses -k jsd
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@"  # `sh` on Debian is another shell
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
environment test
"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
"$PYTHON" -m mypy
exec "$PYTHON" -m pytest -n 2 --dist loadscope "$@"  # two processes, see tests/conftest.py
