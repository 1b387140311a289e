#!/usr/bin/env bash
# A Ray node on this machine, of the cluster that runs share (gkd/cli/launch/node.py).
#   ./launch/ray_cluster.sh head [--port 6379] [--dashboard-port 8265] [--dashboard-host 0.0.0.0] [--simulate-gpus N]
#   ./launch/ray_cluster.sh worker --address HOST:6379 [--simulate-gpus N]
#   ./launch/ray_cluster.sh stop
# GKD_PYTHON names a Python with gkd and its packages to be used instead of .venv.
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@"  # `sh` on Debian is another shell
set -euo pipefail
top=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$top/launch/environment.sh"
case ${1:-} in -h | --help) usage "$0"; exit ;; esac
case ${2:-} in
  -h | --help) PYTHON=${GKD_PYTHON:-$(find_python)} || die "Python 3.11, 3.12 or 3.13 is needed and none was found" ;;
  *) if [ -n "${GKD_PYTHON:-}" ]; then PYTHON=$GKD_PYTHON; else environment; fi ;;
esac
cd "$top"
exec "$PYTHON" -m gkd.cli.launch.node "$@"
