#!/usr/bin/env bash
# The one test command: ruff, mypy --strict, pytest.
#   ./launch/test.sh [PYTEST ARGUMENTS]     e.g. ./launch/test.sh tests/losses -k jsd
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@"  # `sh` on Debian is another shell
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
case ${1:-} in -h | --help) usage "$0"; exit ;; esac
environment test
"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
said=$(mktemp)
types=
trap 'rm -f "$said"; [ -z "$types" ] || kill "$types" 2>/dev/null || true' EXIT
"$PYTHON" -m mypy >"$said" 2>&1 &  # beside the first tests, which leave it a core; what it says comes last
types=$!
code=0
"$PYTHON" -m pytest -n 2 --dist loadscope "$@" || code=$?  # two processes, see tests/conftest.py
wait "$types" || code=$((code ? code : 1))
types=
cat "$said"
exit "$code"
