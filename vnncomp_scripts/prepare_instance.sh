#!/usr/bin/env bash
# prepare_instance.sh v1 CATEGORY ONNX VNNLIB : check that the instance's files are there.
# Analysis is not allowed at this point, and nothing else needs preparation.
set -euo pipefail

if [[ $# -ne 4 || $1 != v1 ]]; then
    echo "usage: prepare_instance.sh v1 CATEGORY ONNX VNNLIB" >&2
    exit 2
fi
for file in "$3" "$4"; do
    if [[ ! -r $file || -d $file ]]; then
        echo "prepare_instance.sh: cannot read '$file'" >&2
        exit 1
    fi
done
