"""Real instances of the verification competitions, whose verdicts are known: none may be contradicted."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from abcrown_dist.spec.property import Verdict
from abcrown_dist.util.deadline import Deadline
from tests import flow

pytestmark = pytest.mark.slow

SHORT = 12.0  # seconds for what cannot be decided yet: enough to reach every part of the flow
LONG = 60.0  # for what must be decided

INSTANCES: dict[str, str] = {
    "acasxu/prop_4": "unsat",
    "acasxu/prop_2": "sat",
    "acasxu/prop_3": "unsat",
    "cifar10_resnet/prop_31_eps_0.008": "unsat",
    "cifar10_resnet/prop_5_eps_0.004": "unsat",
    "eran/mnist_spec_idx_9185_eps_0.01500": "unsat",
    "eran/mnist_spec_idx_7259_eps_0.01200": "sat",
    "marabou-cifar10/networkcifar10_small_index9409_eps0.012_target0_orig9": "",
    "mnist_fc/prop_10_0.05": "",
    "mnist_fc/prop_6_0.05": "sat",
    "mnist_fc/prop_14_0.05": "unsat",
    "mnist_fc/prop_10_0.03": "unsat",
    "oval21/cifar_base_kw-img8095-eps0.010457516339869282": "unsat",
    "oval21/cifar_wide_kw-img1909-eps0.0033986928104575162": "sat",
    "verivital/prop_19_0.02": "unsat",
    "verivital/prop_6_0.004": "",
    "cifar_biasfield/prop_25": "",
    "collins_rul_cnn/robustness_16perturbations_delta20_epsilon10_w20": "unsat",
    "collins_rul_cnn/robustness_8perturbations_delta10_epsilon10_w20": "sat",
    "nn4sys/cardinality_1_360_128_dual": "",
    "reach_prob_density/gcas_0": "unsat",
    "reach_prob_density/robot_1": "sat",
    "rl_benchmarks/lunarlander_case_safe_74": "unsat",
    "rl_benchmarks/cartpole_case_unsafe_36": "sat",
    "rl_benchmarks/dubinsrejoin_case_unsafe_92": "unsat",
    "sri_resnet_a/cifar10_spec_idx_3803_eps_0.00350": "unsat",
    "sri_resnet_a/cifar10_spec_idx_6272_eps_0.00350": "sat",
    "sri_resnet_b/cifar10_spec_idx_8215_eps_0.00350": "unsat",
    "tllverifybench/property_N=16_0": "unsat",
    "cgan/cGAN_imgSz64_nCh_3_prop_1_input_eps_0.010_output_eps_0.015": "",
    "dist_shift/index4192_delta0.13": "",
    "metaroom/spec_idx_51_eps_0.00001000": "unsat",
    "ml4acopf/14_ieee_prop6": "",
    "vit/ibp_3_3_8_6401": "",
    "vit/pgd_2_3_16_241": "",
    "yolo/TinyYOLO_prop_000384_eps_1_255": "",
    "traffic_signs_recognition/model_48_idx_11985_eps_10.00000": "sat",
}
"""By property file: the verdict that is reached within a minute. It may only grow."""


@pytest.fixture(scope="module")
def rows(bench: Path) -> dict[str, dict[str, str]]:
    """Rows of the list by property file."""
    with (bench / "instances.csv").open() as stream:
        return {row["vnnlib"].removesuffix(".vnnlib"): row for row in csv.DictReader(stream)}


def test_every_instance_is_covered(rows: dict[str, dict[str, str]]) -> None:
    assert set(rows) == set(INSTANCES)
    for name, reached in INSTANCES.items():
        assert reached in ("", rows[name]["expected"])


def test_every_sat_is_found(rows: dict[str, dict[str, str]]) -> None:
    """Attacks need no relaxation: there is no excuse for any of them."""
    assert {name for name, row in rows.items() if row["expected"] == "sat"} == {
        name for name, reached in INSTANCES.items() if reached == "sat"
    }


@pytest.mark.parametrize("name", INSTANCES)
def test_the_verdict(bench: Path, rows: dict[str, dict[str, str]], name: str) -> None:
    row, reached = rows[name], INSTANCES[name]
    deadline = Deadline(LONG if reached else SHORT)
    outcome = flow.run(bench / row["onnx"], bench / row["vnnlib"], deadline=deadline)
    verdict = outcome.verdict.value
    if reached:
        assert verdict == reached, outcome.reason
    else:
        assert verdict in (row["expected"], "unknown", "timeout")


TINY = ("acasxu/prop_3", "verivital/prop_19_0.02", "rl_benchmarks/dubinsrejoin_case_unsafe_92")
QUICK = ("mnist_fc/prop_10_0.03", "collins_rul_cnn/robustness_16perturbations_delta20_epsilon10_w20", *TINY)


@pytest.mark.parametrize("name", QUICK)
@pytest.mark.parametrize(
    "words", [("--double_fp",), ("--memory_budget", "4MiB"), ("--batch_size", "1")], ids=" ".join
)
def test_the_verdict_depends_on_no_resource(
    bench: Path, rows: dict[str, dict[str, str]], name: str, words: tuple[str, ...]
) -> None:
    row = rows[name]
    outcome = flow.run(bench / row["onnx"], bench / row["vnnlib"], *words, deadline=Deadline(LONG))
    assert outcome.verdict is Verdict.UNSAT, outcome.reason
