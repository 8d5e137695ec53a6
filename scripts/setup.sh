#!/bin/sh
# Sets up .venv for the demo and the tests; does nothing when it is already up to date.
#
#   PYTHON             interpreter to use (default: the first of python3, python3.13, python3.12, python3.11
#                      that is 3.11 or newer)
#   FLOWPREFILL_TORCH  cpu (default): PyTorch's official CPU index when it answers, else the default index
#                      cuda: the default index, whose Linux builds bring CUDA (several GB)
#                      https://...: an index of your own
#   VENV               where to put the environment (default: .venv)
set -eu
cd "$(dirname "$0")/.."
VENV=${VENV:-.venv}
TORCH_VERSION=2.13.0
CPU_INDEX=https://download.pytorch.org/whl/cpu

say() { printf '\033[1m==>\033[0m %s\n' "$*"; }
die() { printf 'error: %s\n' "$*" >&2; exit 1; }

new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }
if [ -z "${PYTHON:-}" ]; then
  for candidate in python3 python3.13 python3.12 python3.11; do
    if command -v "$candidate" >/dev/null 2>&1 && new_enough "$candidate"; then PYTHON=$candidate; break; fi
  done
fi
[ -n "${PYTHON:-}" ] || die "no Python 3.11 or newer on PATH (python3 is $(python3 --version 2>&1 || echo missing)); install one or set PYTHON=/path/to/python3.11"
new_enough "$PYTHON" || die "PYTHON=$PYTHON is $("$PYTHON" --version 2>&1 || echo missing); 3.11 or newer is needed"

stamp="$VENV/.flowprefill-setup"
wanted=$(cat pyproject.toml constraints.txt scripts/setup.sh | cksum; echo "${FLOWPREFILL_TORCH:-cpu}")
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then exit 0; fi

if ! [ -x "$VENV/bin/python" ]; then
  say "creating $VENV with $("$PYTHON" --version)"
  "$PYTHON" -m venv "$VENV" || die "python -m venv failed; on Debian and Ubuntu: apt-get install python3-venv"
fi
pip() { "$VENV/bin/python" -m pip --disable-pip-version-check "$@"; }

answers() { # does this index answer within a few seconds?
  "$VENV/bin/python" -c 'import sys, urllib.request; urllib.request.urlopen(sys.argv[1] + "/torch/", timeout=8)' "$1" 2>/dev/null
}
if ! "$VENV/bin/python" -c "import importlib.metadata as m, sys; sys.exit(m.version('torch').split('+')[0] != '$TORCH_VERSION')" 2>/dev/null; then
  set -- "torch==$TORCH_VERSION"
  case "${FLOWPREFILL_TORCH:-cpu}" in
    https://*|http://*) set -- "$@" --index-url "$FLOWPREFILL_TORCH" ;;
    cuda) ;;
    cpu) if [ "$(uname -s)" = Linux ] && answers "$CPU_INDEX"; then set -- "$@" --index-url "$CPU_INDEX"; fi ;;
    *) die "FLOWPREFILL_TORCH=$FLOWPREFILL_TORCH is not accepted; use cpu, cuda or the URL of an index" ;;
  esac
  say "installing PyTorch $TORCH_VERSION (${FLOWPREFILL_TORCH:-cpu})"
  pip install "$@"
fi
say "installing flowprefill and its tools"
pip install -c constraints.txt -e '.[serving,operator,dev]'
"$VENV/bin/python" -c 'import flowprefill, flowprefill_crd, flowprefill_operator, torch, transformers' \
  || die "the environment in $VENV does not import; remove it and run again"
printf '%s' "$wanted" > "$stamp"
say "ready: $VENV"
