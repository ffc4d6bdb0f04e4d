#!/usr/bin/env bash
# prepare_instance.sh v1 CATEGORY ONNX VNNLIB : convert the network for run_instance.sh, which takes it from
# the graph cache if its file is still the same.
#
# Analysis is not allowed at this point: the network is converted, and compared with onnxruntime at a
# few points, as every load does. A network that cannot be converted does not fail here:
# run_instance.sh will say so in its results. The interpreter is $ABCROWN_PYTHON, else that of the repository's .venv.
set -euo pipefail

if [[ $# -ne 4 || $1 != v1 ]]; then
    echo "usage: prepare_instance.sh v1 CATEGORY ONNX VNNLIB" >&2
    exit 2
fi
category=$2
for file in "$3" "$4"; do
    if [[ ! -r $file || -d $file ]]; then
        echo "prepare_instance.sh: cannot read '$file'" >&2
        exit 1
    fi
done
onnx=$(realpath -m -- "$3")
vnnlib=$(realpath -m -- "$4")

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
python=${ABCROWN_PYTHON:-$root/.venv/bin/python}
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"

arguments=(--onnx_path "$onnx" --vnnlib_path "$vnnlib")
config="$root/configs/vnncomp/$category.yaml"
if [[ -f $config ]]; then
    arguments=(--config "$config" "${arguments[@]}")
fi
"$python" -m abcrown_dist prepare "${arguments[@]}" >/dev/null ||
    echo "prepare_instance.sh: '$3' is not converted ahead; run_instance.sh will try" >&2
