#!/usr/bin/env bash
# run_instance.sh v1 CATEGORY ONNX VNNLIB RESULTS TIMEOUT : verify one instance.
#
# RESULTS holds a verdict in its first line whatever happens to the verifier. The interpreter is
# $ABCROWN_PYTHON, else the one of the repository's .venv. Settings come from
# configs/vnncomp/CATEGORY.yaml where that exists, else they are chosen automatically. A network that
# prepare_instance.sh has converted is found in the graph cache.
set -euo pipefail

if [[ $# -ne 6 || $1 != v1 ]]; then
    echo "usage: run_instance.sh v1 CATEGORY ONNX VNNLIB RESULTS TIMEOUT" >&2
    exit 2
fi
category=$2
onnx=$(realpath -m -- "$3")
vnnlib=$(realpath -m -- "$4")
results=$(realpath -m -- "$5")
timeout=$6
if [[ ! $timeout =~ ^([0-9]+\.?[0-9]*|\.[0-9]+)$ || ! $timeout =~ [1-9] ]]; then
    echo "run_instance.sh: the timeout '$timeout' is not a positive number of seconds" >&2
    exit 2
fi

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
python=${ABCROWN_PYTHON:-$root/.venv/bin/python}
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"

# A verdict after TIMEOUT counts as none, and interpreters take time to end: the verifier is told
# to stop a little earlier, and is stopped at TIMEOUT if it does not.
limit=$(awk -v t="$timeout" 'BEGIN { margin = 0.05 * t; printf "%.6f", t - (margin < 1 ? margin : 1) }')

arguments=(--onnx_path "$onnx" --vnnlib_path "$vnnlib" --cache_onnx_conversion
    --results_file "$results" --timeout "$limit")
config="$root/configs/vnncomp/$category.yaml"
if [[ -f $config ]]; then
    arguments=(--config "$config" "${arguments[@]}")
fi

# What stands in RESULTS should this script itself be killed. It has no line end, which tells it
# from anything that the verifier writes.
mkdir -p -- "$(dirname -- "$results")"
rm -f -- "$results"
printf 'timeout' >"$results"

status=0
timeout --kill-after=2 "$timeout" "$python" -m abcrown_dist "${arguments[@]}" &
guard=$!
trap 'kill -TERM "$guard" 2>/dev/null || true' TERM INT
wait "$guard" || status=$?
if kill -0 "$guard" 2>/dev/null; then # the trap interrupted the first wait
    wait "$guard" || status=$?
fi

verdict=$(head -n 1 -- "$results" 2>/dev/null || true)
if [[ ! $verdict =~ ^(sat|unsat|unknown|timeout|error)$ || $(wc -l <"$results") -eq 0 ]]; then
    # 124: ended by the guard; 143: by a TERM from outside; 137: by a KILL, the guard's if time is up,
    # otherwise the one of a system that is out of memory.
    verdict=error
    if [[ $status -eq 124 || $status -eq 143 ]]; then
        verdict=timeout
    elif [[ $status -eq 137 ]] && ((SECONDS >= 10#0${timeout%%.*})); then
        verdict=timeout
    fi
    echo "$verdict" >"$results"
fi
