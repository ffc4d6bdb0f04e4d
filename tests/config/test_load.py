"""One loader: precedence, places in messages, and combinations."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import yaml

from abcrown_dist.config import Config, load_config
from abcrown_dist.config.arguments import parse_arguments
from abcrown_dist.config.keys import Key, all_keys, build, to_dict, to_yaml
from abcrown_dist.config.kinds import Bool, Choice, Device, Float, Int, OrAuto, OrNull, Size, Text
from abcrown_dist.config.known import unimplemented
from abcrown_dist.config.schema import Attack
from abcrown_dist.util.errors import ConfigError

MODEL = ["--onnx_path", "m.onnx", "--vnnlib_path", "p.vnnlib"]


def write(folder: Path, text: str) -> Path:
    path = folder / "c.yaml"
    path.write_text(text)
    return path


def refusal(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(list(words))
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_command_line_beats_yaml_beats_defaults(tmp_path: Path) -> None:
    path = write(tmp_path, "bab: {timeout: 60}\nattack:\n  pgd_steps: 7\n  pgd_restarts: 8\n")
    config = load_config(["--config", str(path), *MODEL, "--timeout", "5", "--attack.pgd_steps=9"])
    assert config.bab.timeout == 5.0
    assert (config.attack.pgd_steps, config.attack.pgd_restarts) == (9, 8)
    assert config.attack.attack_mode == "PGD"
    assert config.source == str(path)


def other_word(key: Key) -> str:
    """A word that sets the key to something else than its default, where there is anything else."""
    kind = key.kind.kind if isinstance(key.kind, OrNull | OrAuto) else key.kind
    if isinstance(kind, Choice):
        return kind.values[-1]
    words = {Bool: str(not key.default), Int: "17", Float: "0.375", Size: "17", Text: "x", Device: "cuda:1"}
    return words.get(type(kind), "17 18")


def test_every_option_reaches_its_key() -> None:
    for key in all_keys().values():
        word = other_word(key)
        for flag in (*key.flags, key.name):
            _, entries = parse_arguments([f"--{flag}", *word.split()])
            assert list(entries) == [key.name], flag
            assert entries[key.name].value == key.kind.parse_text(word)
            assert entries[key.name].value != key.default or key.name == "parallel.mode"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--iteration", "20"], {"solver.beta-crown.iteration": 20}),
        (
            ["--lr_alpha", "0.5", "--lr_beta", "3"],
            {"solver.beta-crown.lr_alpha": 0.5, "solver.beta-crown.lr_beta": 3.0},
        ),
        (["--complete_verifier", "bab-refine"], {"general.complete_verifier": "bab-refine"}),
        (["--branching_method", "naive"], {"bab.branching.method": "naive"}),
        (["--bab.branching.input_split.enable", "true"], {"bab.branching.input_split.enable": True}),
        (["--disable_pruning_in_iteration"], {"bab.pruning_in_iteration": False}),
        (["--bab.max_domains", "1e3"], {"bab.max_domains": 1000.0}),
        (["--init_iteration", "20"], {"solver.alpha-crown.iteration": 20}),
        (["--solver.alpha-crown.lr_alpha", "1e-2"], {"solver.alpha-crown.lr_alpha": 0.01}),
        (["--input_shape", "-1", "3", "8", "8"], {"model.input_shape": (1, 3, 8, 8)}),
        (["--double_fp", "--seed", "3"], {"general.double_fp": True, "general.seed": 3}),
        (["--double_fp", "false"], {"general.double_fp": False}),
        (["--no_incomplete"], {"general.enable_incomplete_verification": False}),
        (["--disable_pgd_early_stop"], {"attack.pgd_early_stop": False}),
        (["--solver.crown.memory_budget", "1GiB"], {"solver.crown.memory_budget": 2**30}),
        (["--results_file", "2024"], {"general.results_file": "2024"}),
        (["--select_instance", "0"], {"data.select_instance": (0,)}),
        (["--pgd_alpha", "0.01"], {"attack.pgd_alpha": 0.01}),
    ],
)
def test_words_become_values(words: list[str], expected: dict[str, object]) -> None:
    base = {"model.onnx_path": "m.onnx", "specification.vnnlib_path": "p.vnnlib"}
    assert load_config([*MODEL, *words]) == build({**base, **expected})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--timout", "3"], "command line: unknown option --timout; nearest valid option: --timeout"),
        (["--bab.timout=3"], "command line: unknown key bab.timout; nearest valid key: bab.timeout"),
        (["--general.timeout", "3"], "unknown key general.timeout; nearest valid key: bab.timeout"),
        (["--timeout", "soon"], "command line: bab.timeout: expected a number > 0, got 'soon'"),
        (["--timeout"], "command line: argument --timeout/--bab.timeout: expected one argument"),
        (["--time", "3"], "unknown option --time"),
        (["x.yaml"], "command line: unexpected word 'x.yaml'"),
        (["--double_fp", "1"], "general.double_fp: expected true or false, got 1"),
        (["--seed", "true"], "general.seed: expected a whole number"),
        (["--solver.crown", "3"], "solver.crown is a section: name one of its keys"),
        (
            ["--enabled", "true"],
            "--enabled sets attack.input_split_check_adv.enabled or bab.attack.enabled or bab.clip_n_verify",
        ),
        (["--bab.cut.enabled", "true"], "bab.cut.enabled is a key of alpha-beta-CROWN that"),
        (["--complete_verifier", "Customized"], "general.complete_verifier: 'Customized' is not implemented"),
        (["--complete_verifier", "bab,mip"], "one of auto, bab, mip, bab-refine, skip, got 'bab,mip'"),
        (["--branching_method", "nonlinear"], "bab.branching.method: 'nonlinear' is not implemented yet"),
        (["--bab.force_synchronous", "2"], "bab.force_synchronous: expected true or false, got 2"),
        (["--bab.branching.input_split.batch_size", "0"], "expected auto, or a whole number >= 1, got 0"),
        (["--parallel.mode", "pp"], "parallel.mode: expected one of none, fsdp, tp, auto, got 'pp'"),
        (["--config", "nowhere"], "no configuration nowhere: looked for it as a path and under"),
    ],
)
def test_a_wrong_command_line_is_explained(words: list[str], message: str) -> None:
    assert message in refusal(*MODEL, *words)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bab:\n  timout: 3\n", ":2: unknown key bab.timout; nearest valid key: bab.timeout"),
        ("bab:\n  timeout: soon\n", ":2: bab.timeout: expected a number > 0, got 'soon'"),
        ("bab:\n  timeout: 1\n  timeout: 2\n", ":3: bab.timeout is already set at "),
        ("bab: {}\nbab: {}\n", ":2: bab is already set at "),
        ("babb:\n  timeout: 3\n", ":1: unknown section babb; nearest valid section: bab"),
        ("timeout: 3\n", ":1: unknown key timeout; nearest valid key: bab.timeout"),
        ("bab: 3\n", ":1: bab is a section: expected keys below it"),
        ("- bab\n", ":1: expected sections such as general or model"),
        ("bab: [\n", "not valid YAML"),
        ("bab: {timeout: 1}\n---\nbab: {}\n", "not valid YAML"),
        ("? [a]\n: 3\n", ":1: a key must be one word"),
        ("bab:\n  cut:\n    enabled: true\n", ":2: bab.cut is a section of alpha-beta-CROWN that"),
        ("bab:\n  branching:\n    metod: kfsb\n", ":3: unknown key bab.branching.metod; nearest valid key"),
        (
            "bab:\n  branching:\n    nonlinear_split:\n      method: shortcut\n",
            ":3: bab.branching.nonlinear_split is a section of alpha-beta-CROWN that",
        ),
        ("general:\n  conv_mode: patches\n", ":2: general.conv_mode is a key of alpha-beta-CROWN that"),
        ("general: {seed: yes}\n", ":1: general.seed: expected a whole number"),
        ("general: {seed: !!python/name:os.system x}\n", "not valid YAML"),
        ("bab: 2020-13-45\n", ":1: bab is a section"),
        ("general: {seed: 2020-13-45}\n", ":1: general.seed: "),
        ("general: {seed: \x01}\n", "not valid YAML"),
    ],
)
def test_a_wrong_file_is_explained(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, text)
    found = refusal("--config", str(path), *MODEL)
    assert message in found
    assert str(path) in found


@pytest.mark.parametrize("text", ["", "# nothing\n", "bab:\n  # timeout: 3\n", "null\n"])
def test_an_empty_file_or_section_sets_nothing(tmp_path: Path, text: str) -> None:
    config = load_config(["--config", str(write(tmp_path, text)), *MODEL])
    assert to_dict(config) == to_dict(load_config(MODEL))


def test_yaml_numbers(tmp_path: Path) -> None:
    text = "solver: {alpha-crown: {lr_alpha: 1e-3, iteration: 1e2}}\nbab: {timeout: .inf}\n"
    config = load_config(["--config", str(write(tmp_path, text)), *MODEL])
    assert config.solver.alpha_crown.lr_alpha == 1e-3
    assert config.solver.alpha_crown.iteration == 100
    assert config.bab.timeout == float("inf")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "nothing to verify: set model.onnx_path and specification.vnnlib_path"),
        (MODEL[:2], "model.onnx_path (command line) needs specification.vnnlib_path as well"),
        (MODEL[2:], "specification.vnnlib_path (command line) needs model.onnx_path as well"),
        (
            [*MODEL[:2], "--csv_name", "i.csv"],
            "model.onnx_path (command line) and general.csv_name (command line) exclude each other",
        ),
        (
            [*MODEL[2:], "--csv_name", "i.csv"],
            "specification.vnnlib_path (command line) and general.csv_name",
        ),
        (
            ["--csv_name", "i.csv", "--start", "5", "--end", "2"],
            "data.start (command line) = 5 and data.end (command line) = 2 select no instance",
        ),
        (["--csv_name", "i.csv", "--end", "0"], "data.start (default) = 0 and data.end"),
        (
            ["--csv_name", "i.csv", "--start", "1", "--select_instance", "1"],
            "data.start (command line) and data.select_instance (command line) exclude each other",
        ),
        (
            [*MODEL, "--start", "1"],
            "data.start (command line) selects among the instances of general.csv_name",
        ),
        ([*MODEL, "--select_instance", "1"], "data.select_instance (command line) selects among"),
    ],
)
def test_an_impossible_combination_is_refused(words: list[str], message: str) -> None:
    assert message in refusal(*words)


def test_a_combination_names_the_line_of_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "general:\n  csv_name: i.csv\n")
    assert f"general.csv_name ({path}:2)" in refusal("--config", str(path), *MODEL)
    assert load_config(["--config", str(path), *MODEL, "--csv_name", "null"]).general.csv_name is None


def test_a_config_cannot_be_built_with_an_impossible_value() -> None:
    with pytest.raises(ConfigError, match=r"Attack\.pgd_steps: expected a whole number >= 1, got 0"):
        Attack(pgd_steps=0)
    with pytest.raises(ConfigError, match=r"Attack\.pgd_steps"):
        dataclasses.replace(Attack(), pgd_steps=-1)
    with pytest.raises(KeyError, match=r"bab\.timout"):
        build({"bab.timout": 3})


def test_a_config_is_hashable_and_survives_yaml(tmp_path: Path) -> None:
    config = load_config([*MODEL, "--input_shape", "1", "2", "--timeout", "inf", "--pgd_alpha", "1e-3"])
    assert len({config, load_config([*MODEL]), load_config([*MODEL])}) == 2
    path = write(tmp_path, to_yaml(config))
    again = load_config(["--config", str(path)])
    assert dataclasses.replace(again, source=None) == config
    assert list(yaml.safe_load(to_yaml(Config()))) == [
        *("general", "model", "data", "specification", "solver", "bab", "attack", "parallel", "debug")
    ]


def test_held_keys_are_not_called_unimplemented() -> None:
    assert not unimplemented() & set(all_keys())
    assert "bab.branching.method" in all_keys()  # and alpha-beta-CROWN's, so that it could be
    assert "bab.cut.enabled" in unimplemented()
