#!/usr/bin/env bash
# The one test command.
#   ./launch/test.sh [PYTEST ARGUMENTS]         ruff, and the tests that start neither Ray nor vLLM nor a program
#   ./launch/test.sh --all [PYTEST ARGUMENTS]   ruff, mypy --strict, and every test
# e.g. ./launch/test.sh tests/losses -k jsd; a folder that is named is run whatever it starts: ./launch/test.sh tests/ray/actor
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@"  # `sh` on Debian is another shell
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
case ${1:-} in -h | --help) usage "$0"; exit ;; esac
environment test
"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
# Bytecode is written once for all programs that tests start, and pytest keeps that of the tests for the next time.
unset PYTHONDONTWRITEBYTECODE
"$PYTHON" -m compileall -q gkd recipes tests
types=
output=$(mktemp)
trap 'rm -f "$output"; [ -z "$types" ] || kill "$types" 2>/dev/null || true' EXIT
if [[ " $* " == *" --all "* ]]; then
  "$PYTHON" -m mypy >"$output" 2>&1 &  # beside the first tests, which leave it a core; its report comes last
  types=$!
fi
code=0
# Three on two cores, as many a test waits for a time. See tests/conftest.py. And without plugins that packages bring and
# nothing here uses.
"$PYTHON" -m pytest -n 3 --dist loadscope -p no:anyio -p no:hydra_pytest "$@" || code=$?
if [ -n "$types" ]; then
  wait "$types" || code=$((code ? code : 1))
  types=
  cat "$output"
fi
exit "$code"
