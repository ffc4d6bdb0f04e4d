#!/usr/bin/env bash
# One GPU, under ten minutes: do CUDA bounds agree with those of the CPU, does NCCL start, and how much
# memory do passes take on the device?
#
#     benchmarks/gpu_smoke.sh [PYTHON]      # default: .venv/bin/python beside this folder
#
# Exit code 0: all agree; 1: something does not; 2: there is no GPU, or no Python with a CUDA build of torch.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${1:-$root/.venv/bin/python}
export PYTHONPATH=$root OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}

if ! "$python" -c 'import torch' 2>/dev/null; then
    echo "gpu_smoke: $python cannot import torch; run make install, or name another Python" >&2
    exit 2
fi
if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "gpu_smoke: torch sees no CUDA device here; nothing was checked" >&2
    exit 2
fi
"$python" -c 'import torch; print(torch.cuda.get_device_name(), "torch", torch.__version__)'

failed=0
step() {
    local title=$1
    shift
    echo "== $title"
    if ! "$@"; then
        echo "FAILED: $title" >&2
        failed=1
    fi
}

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

step "CPU and CUDA bounds agree; NCCL on one rank" \
    timeout 240 "$python" "$root/benchmarks/gpu_parity.py"
step "the shipped example on CUDA, one NCCL rank" \
    timeout 120 "$python" -m torch.distributed.run --nproc_per_node=1 "$root/abcrown_dist.py" \
    --config digits_mlp.yaml --general.device cuda --parallel.mode fsdp --results_file "$work/out.txt"
step "its verdict" grep -qx unsat "$work/out.txt"
step "memory on the device" \
    timeout 240 "$python" "$root/benchmarks/sharding.py" --device cuda --worlds 1 \
    --networks mlp_1024x4 mlp_4096x4 mlp_8192x4 mlp_4096x8

exit "$failed"
