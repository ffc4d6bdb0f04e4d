"""Real networks of the verification competitions: all load, agree with onnxruntime and come out canonical."""

from __future__ import annotations

import csv
from collections import Counter
from pathlib import Path

import pytest

from abcrown_dist.graph.aten import classify
from abcrown_dist.graph.check import check
from abcrown_dist.graph.load_onnx import capture, load_onnx
from abcrown_dist.graph.onnx_file import input_ports, read_onnx
from abcrown_dist.graph.rewrite import rewrite
from tests.graph.test_rewrite import assert_equal_functions

# network: (nodes after rewriting, its nonlinear ops)
EXPECTED = {
    "acasxu/ACASXU_run2a_5_4_batch_2000.onnx": (15, {"relu": 6}),
    "acasxu/ACASXU_run2a_3_7_batch_2000.onnx": (15, {"relu": 6}),
    "acasxu/ACASXU_run2a_4_9_batch_2000.onnx": (15, {"relu": 6}),
    "cifar10_resnet/resnet_2b.onnx": (18, {"relu": 6}),
    "cifar10_resnet/resnet_4b.onnx": (29, {"relu": 10}),
    "eran/mnist_relu_9_200.onnx": (20, {"relu": 9}),
    "eran/ffnnSIGMOID__Point_6x200.onnx": (15, {"sigmoid": 6}),
    "marabou-cifar10/cifar10_small.onnx": (13, {"relu": 4}),
    "mnist_fc/mnist-net_256x6.onnx": (15, {"relu": 6}),
    "mnist_fc/mnist-net_256x4.onnx": (11, {"relu": 4}),
    "mnist_fc/mnist-net_256x2.onnx": (7, {"relu": 2}),
    "oval21/cifar_base_kw.onnx": (9, {"relu": 3}),
    "oval21/cifar_wide_kw.onnx": (9, {"relu": 3}),
    "verivital/Convnet_avgpool.onnx": (6, {"relu": 1}),
    "verivital/Convnet_maxpool.onnx": (6, {"relu": 1, "max_pool2d_with_indices": 1}),
    "cifar_biasfield/cifar_bias_field_25.onnx": (19, {"relu": 7}),
    "collins_rul_cnn/NN_rul_small_window_20.onnx": (13, {"relu": 5}),
    "collins_rul_cnn/NN_rul_full_window_20.onnx": (13, {"relu": 5}),
    "nn4sys/mscn_128d_dual.onnx": (84, {"relu": 14, "mul": 6, "div": 6, "sigmoid": 2}),
    "reach_prob_density/gcas.onnx": (6, {"relu": 2}),
    "reach_prob_density/robot.onnx": (8, {"relu": 3}),
    "rl_benchmarks/lunarlander.onnx": (6, {"relu": 2}),
    "rl_benchmarks/cartpole.onnx": (6, {"relu": 2}),
    "rl_benchmarks/dubinsrejoin.onnx": (6, {"relu": 2}),
    "sri_resnet_a/resnet_3b2_bn_mixup_adv_4.0_bs128_lr-1.onnx": (25, {"relu": 8}),
    "sri_resnet_b/resnet_3b2_bn_mixup_ssadv_4.0_bs128_lr-1_v2.onnx": (25, {"relu": 8}),
    "tllverifybench/tllBench_n=2_N=M=16_m=1_instance_1_0.onnx": (27, {"relu": 8}),
    "cgan/cGAN_imgSz64_nCh_3.onnx": (32, {"relu": 9}),
    "dist_shift/mnist_concat.onnx": (10, {"relu": 3, "sigmoid": 1}),
    "metaroom/4cnn_tz_19_3_no_custom_OP.onnx": (9, {"relu": 3}),
    "ml4acopf/14_ieee_ml4acopf.onnx": (95, {"relu": 3, "sigmoid": 1, "pow": 7, "cos": 1, "sin": 1, "mul": 3}),
    "vit/ibp_3_3_8.onnx": (119, {"bmm": 6, "_softmax": 3, "relu": 3}),
    "vit/pgd_2_3_16.onnx": (82, {"bmm": 4, "_softmax": 2, "relu": 2}),
    "yolo/TinyYOLO.onnx": (30, {"relu": 7}),
    "traffic_signs_recognition/3_48_48_QConv_32_5_MP_2_BN_QConv_64_5_MP_2_BN_QConv_64_3_BN_Dense_256_BN_Dense_43_ep_30.onnx": (  # noqa: E501
        32,
        {"max_pool2d_with_indices": 2, "sign": 8, "_softmax": 1},
    ),
}


def test_all_networks_are_covered(bench: Path) -> None:
    with (bench / "instances.csv").open() as stream:
        assert {row["onnx"] for row in csv.DictReader(stream)} == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_network_loads(bench: Path, name: str) -> None:
    """`load_onnx` compares with onnxruntime by itself and raises when they differ."""
    loaded = load_onnx(bench / name)
    graph = check(loaded.graph)
    nonlinear = Counter(node.op for node in graph if classify(node) == "nonlinear")
    assert (len(graph), dict(nonlinear)) == EXPECTED[name]
    assert loaded.warnings == ()
    assert not {node.op for node in graph} & {
        "addmm",
        "convolution",
        "native_batch_norm",
        "detach",
        "clone",
        "t",
    }


@pytest.mark.parametrize("name", EXPECTED)
def test_rewriting_preserves_the_function(bench: Path, name: str) -> None:
    model = read_onnx(bench / name)
    ports = input_ports(model, name)
    raw = capture(model, ports, name)
    assert_equal_functions(raw, rewrite(raw, ports[0].dtype), points=2)
