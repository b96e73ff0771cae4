#!/usr/bin/env bash
# dependencies.sh lowest|newest WHEEL [PYTEST ARGUMENTS]: the tests with the lowest versions of all dependencies that
# pyproject.toml allows, or with the newest ones. By hand, before a release: an index of packages is asked.
set -euo pipefail
which=$1 wheel=$(realpath "$2")
shift 2
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
export PATH="$work/venv/bin:$PATH" PIP_DISABLE_PIP_VERSION_CHECK=1 CI=true
touch "$work/constraints"
if [ "$which" = lowest ]; then
  python - > "$work/constraints" << 'END'
import re
for name, least in sorted(set(re.findall(r'"([\w-]+)(?:\[\w+\])?>=([\d.]+)"', open("pyproject.toml").read()))):
    if name != "scikit-build-core":  # builds only
        print(f"{name}=={least}")
END
fi
pip install -q --only-binary :all: -c "$work/constraints" "$wheel[test]"
pip list --format=freeze
pytest -p no:cacheprovider "$@"
