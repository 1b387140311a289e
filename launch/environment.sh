# Sourced by the scripts beside it: makes .venv with what this machine can use, once for every pyproject.toml.
#   environment EXTRAS...     e.g. environment test
# Sets PYTHON. GKD_DEVICE=cpu or cuda overrides what is found.

die() { echo "error: $*" >&2; exit 2; }

# The comment at the head of a script, for its --help.
usage() { sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$1"; }

find_python() {
  local candidate
  for candidate in python3.13 python3.12 python3.11 python3; do
    if "$candidate" -c 'import sys; raise SystemExit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  return 1
}

find_device() {  # [DIRECTORY OF DEVICE FILES]
  # Its whole output first: under pipefail a grep that ends early would end nvidia-smi by a signal, and find no GPU.
  # A container may have GPUs without it, and a driver that fails is no reason to compute on the CPU without a word.
  if [[ $(nvidia-smi -L 2>/dev/null) == *GPU* ]] || compgen -G "${1:-/dev}/nvidia[0-9]*" >/dev/null; then
    echo cuda
  else
    echo cpu
  fi
}

require_compiler() {  # PYTHON: what Triton builds GPU kernels with, at run time
  local cc headers
  cc=${CC:-$(command -v gcc || command -v clang || true)}
  headers=$("$1" -c 'import sysconfig; print(sysconfig.get_paths()["include"])')
  [ -n "$cc" ] && echo '#include <Python.h>' | "$cc" -fsyntax-only -x c -I"$headers" - 2>/dev/null ||
    die "GPUs need a C compiler and Python's headers ($headers/Python.h), for Triton builds kernels with them; tried: ${cc:-gcc and clang, which are not there} (Debian: apt-get install gcc python3-dev; GKD_DEVICE=cpu does without GPUs)"
}

install_cpu_torch() {
  # The plain torch of the package index is a CUDA build of several GB; the CPU build has a name of its own, and an
  # index of its own where the configured one lacks it.
  local wanted="torch==2.13.0+cpu"
  "$PYTHON" -m pip install --quiet "$wanted" 2>/dev/null ||
    "$PYTHON" -m pip install --quiet --index-url https://download.pytorch.org/whl/cpu "$wanted" ||
    die "cannot install $wanted: neither the configured package index nor PyTorch's CPU index has it for this Python"
}

environment() {
  local top device extras digest stamp base
  top=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
  cd "$top"
  device=${GKD_DEVICE:-$(find_device)}
  [ "$device" = cpu ] || [ "$device" = cuda ] || die "GKD_DEVICE=$device: expected cpu or cuda"
  extras=$(IFS=,; echo "$device${*:+,$*}")
  digest=$(cat pyproject.toml launch/environment.sh | sha256sum | cut -c1-16)
  stamp=".venv/.installed-$extras-$digest"
  PYTHON="$top/.venv/bin/python"
  # What was installed with further extras is enough for fewer.
  if [ -x "$PYTHON" ] && compgen -G ".venv/.installed-$extras*-$digest" >/dev/null; then return; fi
  base=$PYTHON
  if [ ! -x "$PYTHON" ]; then
    base=$(find_python) || die "Python 3.11, 3.12 or 3.13 is needed and none was found (Debian: apt-get install python3 python3-venv)"
  fi
  if [ "$device" = cuda ]; then require_compiler "$base"; fi
  if [ ! -x "$PYTHON" ]; then
    echo "making .venv with $("$base" --version)"
    "$base" -m venv .venv || { rm -rf .venv; die "$base cannot make a virtual environment (Debian: apt-get install python3-venv)"; }
  fi
  echo "installing gkd[$extras] into .venv; the first time this takes some minutes"
  if [ "$device" = cpu ]; then install_cpu_torch; fi
  "$PYTHON" -m pip install --quiet --editable ".[$extras]" || die "installing gkd[$extras] failed; the lines above say why"
  if [ "$device" = cpu ]; then
    # vLLM asks for these; beside a CPU torch their CUDA builds keep transformers from being imported. Nothing here uses them.
    "$PYTHON" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec 2>/dev/null
  fi
  "$PYTHON" -c "import torch, transformers, vllm, ray, hydra" 2>/dev/null ||
    die "the installation is incomplete: $("$PYTHON" -c "import torch, transformers, vllm, ray, hydra" 2>&1 | tail -n 1)"
  rm -f .venv/.installed-"$extras"-*
  touch "$stamp"
}
