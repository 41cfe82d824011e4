#!/usr/bin/env bash
# Tests of front ends, one environment an extra: build/frontends/NAME holds the framework, over the packages of .venv.
# Usage: scripts/test_frontends.sh NAME… [-- pytest's arguments]; make test-frontends runs all.
set -euo pipefail
cd "$(dirname "$0")/.."

# What the tests of an extra need besides the extra itself.
declare -A tools=([torch]="transformers>=5,<6 expecttest")
declare -A folder=([keras]=tests/keras_frontend [torch]=tests/torch_frontend [tensorflow]=tests/tensorflow_frontend)
# PIP_EXTRA_INDEX_URL names another index, such as that of PyTorch's wheels without CUDA.

names=()
while [[ $# -gt 0 && $1 != -- ]]; do names+=("$1"); shift; done
[[ $# -gt 0 ]] && shift

requirements() {
    .venv/bin/python - "$1" <<'PY'
import sys, tomllib
with open("pyproject.toml", "rb") as file:
    print("\n".join(tomllib.load(file)["project"]["optional-dependencies"][sys.argv[1]]))
PY
}

install() {
    local name=$1 place=$2 wanted
    wanted=$(requirements "$name")
    local stamp="$place/.stamp" state
    state=$(printf '%s\n' "$wanted" "${tools[$name]:-}" | sha256sum)
    [[ -f $stamp && $(<"$stamp") == "$state" ]] && return
    echo "installing what the tests of $name need into $place"
    rm -rf "$place"
    .venv/bin/python -m venv "$place"
    .venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
        > "$("$place/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth"
    mapfile -t lines <<< "$wanted"
    "$place/bin/python" -m pip install --quiet "${lines[@]}"
    # shellcheck disable=SC2086
    [[ -z ${tools[$name]:-} ]] || "$place/bin/python" -m pip install --quiet ${tools[$name]}
    printf '%s\n' "$state" > "$stamp"
}

for name in "${names[@]}"; do
    place="build/frontends/$name"
    install "$name" "$place"
    echo "tests of $name"
    "$place/bin/python" -m pytest "${folder[$name]}" -p no:xdist "$@"
done
