#!/bin/sh
# Builds the images of this checkout with docker, podman or buildah:
#   build.sh [operator] [serving] [proxy] [serving-vllm] [serving-vllm-cpu]
# Without a name the first three: those with vLLM are large (GPUs: about 10 GB).
#
#   BUILDER          docker, podman or buildah (default: the first of them on PATH)
#   REGISTRY         put before the names, as in registry.example.com/team (default: none)
#   TAG              default: the project's version
#   BASE TORCH_INDEX EMBEDDED_MODELS
#                    build arguments, see the Dockerfiles
#   BUILD_FLAGS      more flags for the builder, separated by spaces
#   PUSH             1: push what was built
set -eu
cd "$(dirname "$0")/.."
die() { printf 'error: %s\n' "$*" >&2; exit 1; }

if [ -z "${BUILDER:-}" ]; then
  for candidate in docker podman buildah; do
    if command -v "$candidate" >/dev/null 2>&1; then BUILDER=$candidate; break; fi
  done
fi
[ -n "${BUILDER:-}" ] || die "none of docker, podman and buildah is on PATH; install one (on Debian and Ubuntu: apt-get install buildah), or set BUILDER"
case "$BUILDER" in docker | podman | buildah) ;; *) die "BUILDER=$BUILDER is not accepted; use docker, podman or buildah" ;; esac
command -v "$BUILDER" >/dev/null 2>&1 || die "BUILDER=$BUILDER is not on PATH"

version=$(sed -n 's/^version = "\(.*\)"$/\1/p' pyproject.toml)
TAG=${TAG:-$version}
revision=$(git rev-parse HEAD 2>/dev/null || echo unknown)

# The arguments that are set, also those set to nothing: an empty TORCH_INDEX means pip's own index.
arguments() {
  for name in BASE TORCH_INDEX EMBEDDED_MODELS; do
    eval "value=\${$name-unset}"
    [ "$value" = unset ] || printf '%s\n' --build-arg "$name=$value"
  done
}

[ $# -gt 0 ] || set -- operator serving proxy
for image in "$@"; do
  target='' device=''
  case "$image" in
    operator) file=images/operator/Dockerfile ;;
    serving) file=images/serving/Dockerfile target=serving ;;
    proxy) file=images/serving/Dockerfile target=proxy ;;
    serving-vllm) file=images/serving-vllm/Dockerfile device=cuda ;;
    serving-vllm-cpu) file=images/serving-vllm/Dockerfile device=cpu ;;
    *) die "there is no image $image; accepted are operator, serving, proxy, serving-vllm and serving-vllm-cpu" ;;
  esac
  name=${REGISTRY:+$REGISTRY/}flowprefill/$image:$TAG
  printf '\033[1m==>\033[0m building %s with %s\n' "$name" "$BUILDER"
  (
    set -f
    IFS='
'
    set -- $(arguments)
    IFS=' '
    # shellcheck disable=SC2086 # BUILD_FLAGS is a list
    "$BUILDER" build ${BUILD_FLAGS:-} ${target:+--target "$target"} ${device:+--build-arg DEVICE="$device"} "$@" \
      --build-arg VERSION="$version" --build-arg REVISION="$revision" -f "$file" -t "$name" .
  )
  [ "${PUSH:-0}" != 1 ] || "$BUILDER" push "$name"
done
