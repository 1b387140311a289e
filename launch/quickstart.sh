#!/usr/bin/env bash
# Installs what this machine can use into .venv and distils a teacher into a student with the built-in task.
#   ./launch/quickstart.sh [OVERRIDES]      e.g. ./launch/quickstart.sh trainer.total_steps=5
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@"  # `sh` on Debian is another shell
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
case ${1:-} in -h | --help) usage "$0"; exit ;; esac
environment
case " $*" in *" +recipe="*) ;; *) set -- +recipe=on_policy_distill "$@" ;; esac
exec "$PYTHON" -m gkd.main "$@"
