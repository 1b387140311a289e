#!/usr/bin/env bash
# Installs what this machine can use into .venv and distils a teacher into a student with the built-in task.
#   ./launch/quickstart.sh [OVERRIDES]      e.g. ./launch/quickstart.sh trainer.total_steps=5
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
environment
exec "$PYTHON" -m gkd.main +recipe=on_policy_distill "$@"
