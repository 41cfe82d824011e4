#!/usr/bin/env bash
# Tests of front ends, one environment an extra: build/frontends/NAME holds the framework, over the packages of .venv.
# Usage: scripts/test_frontends.sh [--where-installable] NAME… [-- pytest's arguments]; make test-frontends runs all.
#
# --where-installable, for CI: a front end is left out, with a line that says so, where its environment cannot be had at
# all: no package index answers pip, or PyTorch is there only as a build for CUDA. An index that answers and an
# installation that fails all the same (a wrong range, a conflict) is a failure, with or without the option.
#
# PyTorch: of its builds for Linux on x86_64 the one for CUDA is PyPI's, with gigabytes of libraries without which it
# cannot be imported. Here its CPU build is asked for by version: first from where pip is set up to look (PIP_FIND_LINKS,
# PIP_EXTRA_INDEX_URL, pip.conf), then from PyTorch's own index. TORCH_BUILD=default takes whatever pip takes.
set -euo pipefail
cd "$(dirname "$0")/.."

# What the tests of an extra need besides the extra itself.
declare -A tools=([torch]="transformers>=5,<6 expecttest pillow keras>=3.15.1,<3.16")
# The same without what it asks for: timm wants torchvision, which goes with the CUDA build only.
declare -A tools_alone=([torch]="timm>=1.0,<2")
declare -A folder=([keras]=tests/keras_frontend [torch]=tests/torch_frontend [tensorflow]=tests/tensorflow_frontend)
torch_cpu="torch==2.13.0+cpu"
torch_cpu_index=https://download.pytorch.org/whl/cpu

readonly cannot_be_had=3
where_installable=false
names=()
while [[ $# -gt 0 && $1 != -- ]]; do
    if [[ $1 == --where-installable ]]; then where_installable=true; else names+=("$1"); fi
    shift
done
[[ $# -gt 0 ]] && shift

requirements() {
    .venv/bin/python - "$1" <<'PY'
import sys, tomllib
with open("pyproject.toml", "rb") as file:
    print("\n".join(tomllib.load(file)["project"]["optional-dependencies"][sys.argv[1]]))
PY
}

purelib() { "$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }

# Whether the index that pip is set up with answers.
index_answers() {
    "$1" -m pip download --quiet --no-deps --retries 1 --timeout 20 --dest "$2/.probe" iniconfig > /dev/null 2>&1
}

install_torch_cpu() {
    [[ ${TORCH_BUILD:-cpu} == cpu && $(uname -sm) == "Linux x86_64" ]] || return 0
    "$1" -m pip install --quiet "$torch_cpu" 2> /dev/null && return 0
    "$1" -m pip install --quiet --retries 1 --timeout 20 --extra-index-url "$torch_cpu_index" "$torch_cpu" 2> /dev/null \
        && return 0
    echo "torch: no index offers $torch_cpu, only a build for CUDA of several GB (TORCH_BUILD=default takes it)" >&2
    return "$cannot_be_had"
}

# Returns 0: the environment is there; $cannot_be_had: see above; anything else: it should be, and is not.
install() {
    local name=$1 place=$2 wanted state lines
    wanted=$(requirements "$name") || return
    state=$(printf '%s\n' "$wanted" "${tools[$name]:-}" "${tools_alone[$name]:-}" "$torch_cpu" "${TORCH_BUILD:-}" | sha256sum)
    [[ -f $place/.stamp && $(<"$place/.stamp") == "$state" ]] && return
    echo "installing what the tests of $name need into $place"
    rm -rf "$place"
    .venv/bin/python -m venv "$place" || return
    { purelib .venv/bin/python && pwd; } > "$(purelib "$place/bin/python")/base.pth" || return
    if ! index_answers "$place/bin/python" "$place"; then
        echo "$name: no package index answers pip" >&2
        return "$cannot_be_had"
    fi
    [[ $name != torch ]] || install_torch_cpu "$place/bin/python" || return
    mapfile -t lines <<< "$wanted"
    # shellcheck disable=SC2086
    "$place/bin/python" -m pip install --quiet "${lines[@]}" ${tools[$name]:-} || return
    # shellcheck disable=SC2086
    [[ -z ${tools_alone[$name]:-} ]] || "$place/bin/python" -m pip install --quiet --no-deps ${tools_alone[$name]} || return
    printf '%s\n' "$state" > "$place/.stamp"
}

# The tests of one run while the next one is installed, and beside its tests: each waits for its servers half of the time.
declare -A running=()
trap 'kill "${running[@]}" 2> /dev/null || true' EXIT
for name in "${names[@]}"; do
    place="build/frontends/$name"
    status=0
    install "$name" "$place" || status=$?
    if [[ $status == "$cannot_be_had" && $where_installable == true ]]; then
        echo "tests of $name are left out: their environment cannot be had here"
        continue
    fi
    if [[ $status != 0 ]]; then
        echo "the environment of $name could not be installed" >&2
        exit "$status"
    fi
    echo "tests of $name, into $place/tests.log"
    "$place/bin/python" -m pytest "${folder[$name]}" -p no:xdist -o cache_dir="$place/tests" "$@" > "$place/tests.log" 2>&1 &
    running[$name]=$!
done

result=0
for name in "${names[@]}"; do
    [[ -n ${running[$name]:-} ]] || continue
    status=0
    wait "${running[$name]}" || status=$?
    unset "running[$name]"
    echo "tests of $name:"
    cat "build/frontends/$name/tests.log"
    [[ $status == 0 ]] || result=$status
done
exit "$result"
