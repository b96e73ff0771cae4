#!/usr/bin/env bash
# dependencies.sh lowest|newest WHEEL [PYTEST ARGUMENTS]: the tests with the lowest versions of all dependencies that
# pyproject.toml allows, or with the newest ones. By hand, before a release: uv asks an index of packages.
set -euo pipefail
declare -A resolution=([lowest]=lowest-direct [newest]=highest)
which=${resolution[$1]} wheel=$(realpath "$2")
shift 2
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
uv venv -q "$work/venv"
export VIRTUAL_ENV="$work/venv" PATH="$work/venv/bin:$PATH" CI=true
uv pip install -q --only-binary :all: --resolution "$which" -r pyproject.toml --extra test
uv pip install -q --no-deps "$wheel"
uv pip freeze
pytest -p no:cacheprovider -W default::DeprecationWarning "$@"  # what old versions use of newer ones is not ours
