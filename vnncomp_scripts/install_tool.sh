#!/usr/bin/env bash
# install_tool.sh v1 : make the virtual environment .venv with everything that the verifier needs.
set -euo pipefail

if [[ $# -ne 1 || $1 != v1 ]]; then
    echo "usage: install_tool.sh v1" >&2
    exit 2
fi
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)

# A fresh Debian or Ubuntu has neither make nor the venv module.
if ! command -v make >/dev/null || ! python3 -c 'import ensurepip' 2>/dev/null; then
    as_root=()
    [[ $EUID -eq 0 ]] || as_root=(sudo)
    "${as_root[@]}" apt-get update
    "${as_root[@]}" apt-get install --yes make python3-venv
fi

make -C "$root" install
"$root/.venv/bin/python" -m abcrown_dist --help >/dev/null
echo "installed in $root/.venv"
