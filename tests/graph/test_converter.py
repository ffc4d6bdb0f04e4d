"""onnx2pytorch comes without torchvision, whose operators work all the same."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent

# Each runs in an interpreter of its own: what is imported can only be seen once.
_LIGHT = """
import json, sys
from abcrown_dist.graph.converter import import_onnx2pytorch
module = import_onnx2pytorch()
loaded = [name for name in sys.modules if name.split(".")[0] == "torchvision" or name == "torch._dynamo"]
import torch, torchvision
from onnx2pytorch.operations.roialign import roi_align
from onnx2pytorch.operations.imagedecoder import ImageReadMode
from onnx2pytorch.operations import nonmaxsuppression
image, box = torch.arange(64.0).reshape(1, 1, 8, 8), [torch.tensor([[0.0, 0.0, 4.0, 4.0]])]
print(json.dumps({
    "name": module.__name__, "converts": hasattr(module, "ConvertModel"), "loaded": loaded,
    "real": torchvision.ops.__file__ is not None,
    "call": bool((roi_align(image, box, 2) == torchvision.ops.roi_align(image, box, 2)).all()),
    "submodule": nonmaxsuppression.torchvision.ops.nms(box[0], torch.ones(1), 0.5).tolist(),
    "attribute": ImageReadMode.RGB is torchvision.io.ImageReadMode.RGB,
}))
"""
_PRESENT = """
import torchvision
from abcrown_dist.graph.converter import import_onnx2pytorch
import_onnx2pytorch()
from onnx2pytorch.operations import roialign
assert roialign.roi_align is torchvision.ops.roi_align
"""


def _python(code: str) -> str:
    words = [sys.executable, "-c", code]
    result = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_torchvision_waits_until_it_is_used() -> None:
    found = json.loads(_python(_LIGHT))
    assert found["name"] == "onnx2pytorch" and found["converts"]
    assert found["loaded"] == []
    assert found["real"], "a stand-in was left in sys.modules"
    assert found["call"] and found["attribute"]
    assert found["submodule"] == [0]


def test_a_torchvision_that_is_there_is_used_as_it_is() -> None:
    _python(_PRESENT)
