"""VNN-LIB 1.0 against a second reader, and its errors with their places."""

from __future__ import annotations

import gzip
import logging
import random
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from abcrown_dist.spec import assemble, dnf
from abcrown_dist.spec.property import Property
from abcrown_dist.spec.vnnlib1 import check_sizes, load_vnnlib, parse_vnnlib
from abcrown_dist.util.errors import LoadError


def declared(inputs: int, outputs: int, *assertions: str) -> str:
    names = [f"X_{i}" for i in range(inputs)] + [f"Y_{i}" for i in range(outputs)]
    lines = [f"(declare-const {name} Real)" for name in names]
    return "\n".join([*lines, *(f"(assert {item})" for item in assertions)])


def one_input(*assertions: str) -> str:
    """X_0 in [-1, 1], two outputs, and some assertions."""
    return declared(1, 2, "(>= X_0 -1)", "(<= X_0 1)", *assertions)


def only(prop: Property) -> tuple[dict[str, Decimal], Decimal, bool]:
    """Coefficients, right-hand side and strictness of the only constraint."""
    (disjunct,) = prop.disjuncts
    ((coefficients, rhs),) = disjunct.terms
    assert disjunct.strict is not None
    return coefficients, rhs, bool(disjunct.strict[0])


# Meaning


class Writer:
    """Writes random formulas over X_0, X_1, Y_0, Y_1."""

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw

    def constant(self, depth: int) -> str:
        if depth == 0 or self.draw.random() < 0.6:
            return self.draw.choice(
                ["0", "-0", "1", "-2", ".5", "+3", "1e-3", "2.5E1", "-7.25", "4.", "1e-30"]
            )
        operands = [self.constant(depth - 1) for _ in range(self.draw.randint(1, 3))]
        return f"({self.draw.choice('+-*')} {' '.join(operands)})"

    def term(self, depth: int) -> str:
        kind = self.draw.randrange(8) if depth else self.draw.randrange(3)
        if kind < 2:
            return self.draw.choice(["X_0", "X_1", "Y_0", "Y_1"])
        if kind == 2:
            return self.constant(2)
        if kind == 3:
            return f"(* {self.constant(1)} {self.term(depth - 1)} 2)"
        if kind == 4:
            return f"(/ {self.term(depth - 1)} {self.draw.choice(['3', '-0.7', '(* 2 8)'])})"
        operands = [self.term(depth - 1) for _ in range(self.draw.randint(1, 3))]
        return f"({self.draw.choice('+-')} {' '.join(operands)})"

    def formula(self, depth: int) -> str:
        if depth == 0 or self.draw.random() < 0.3:
            operator = self.draw.choice(["<=", ">=", "<", ">", "="])
            return f"({operator} {self.term(2)} {self.term(1)})"
        operands = [self.formula(depth - 1) for _ in range(self.draw.randint(0, 3))]
        return f"({self.draw.choice(['and', 'or'])} {' '.join(operands)})"


@pytest.mark.parametrize("multiplied", [64, 1])
@pytest.mark.parametrize("seed", range(10))
def test_random_formulas_mean_the_same(
    reference: ModuleType, monkeypatch: pytest.MonkeyPatch, seed: int, multiplied: int
) -> None:
    monkeypatch.setattr(dnf, "_FEW", multiplied)
    monkeypatch.setattr(assemble, "_FEW", multiplied)
    monkeypatch.setattr(assemble, "_SOME_BOXES", multiplied)
    draw = random.Random(seed)
    writer = Writer(draw)
    ranges = [f"({op} X_{i} {bound})" for i in (0, 1) for op, bound in (("<=", "1"), (">=", "-1.25"))]
    answers = []
    for _ in range(40):
        text = declared(2, 2, *ranges, *(writer.formula(4) for _ in range(2)))
        prop = parse_vnnlib(text)
        for _ in range(10):
            values = {name: Fraction(draw.randint(-5, 5), 4) for name in ("X_0", "X_1", "Y_0", "Y_1")}
            answers.append(reference.text_holds(text, values))
            assert reference.property_holds(prop, values) == answers[-1], text
    assert len(answers) > 300
    assert 20 < sum(answers) < len(answers) - 20


def test_real_files_mean_the_same(bench: Path, reference: ModuleType) -> None:
    """Points in boxes of the property; outputs drawn around the constants that occur, so both answers do."""
    draw = random.Random(0)
    answers = set()
    for path in sorted(bench.glob("*/*.vnnlib")):
        if path.stat().st_size > 400_000:
            continue  # the second reader is slow; all files are parsed in the next test
        text, prop = path.read_text(), load_vnnlib(path)
        parsed = [form[1] for form in reference.forms(text) if form[0] == "assert"]
        for _ in range(3):
            disjunct = draw.choice(prop.disjuncts)
            constants = [float(rhs) for _, rhs in disjunct.terms]
            values = {
                f"X_{i}": Fraction(low) + (Fraction(high) - Fraction(low)) * Fraction(draw.randrange(5), 4)
                for i, (low, high) in enumerate(zip(disjunct.box.lower, disjunct.box.upper, strict=True))
            }
            if draw.random() < 0.3:
                values[f"X_{draw.randrange(prop.num_inputs)}"] += draw.choice([-1000, 1000])
            for i in range(prop.num_outputs):
                values[f"Y_{i}"] = Fraction(draw.choice([-1, 1]) * draw.choice(constants) + draw.gauss(0, 1))
            expected = all(reference.holds(form, values) for form in parsed)
            assert reference.property_holds(prop, values) == expected, path
            answers.add(expected)
    assert answers == {True, False}


def test_all_real_files_parse(bench: Path) -> None:
    paths = sorted(bench.glob("*/*.vnnlib"))
    assert len(paths) >= 37
    for path in paths:
        prop = load_vnnlib(path)
        assert prop.disjuncts, path
        assert not any(disjunct.box.empty for disjunct in prop.disjuncts), path


def test_matrices_say_what_the_terms_say() -> None:
    prop = parse_vnnlib(one_input("(<= (- (* 2 Y_0) X_0) (+ Y_1 0.5))", "(> Y_1 (* 3 (+ X_0 1)))"))
    (disjunct,) = prop.disjuncts
    np.testing.assert_array_equal(disjunct.C, [[2, -1], [0, -1]])
    np.testing.assert_array_equal(disjunct.D, [[-1], [3]])
    np.testing.assert_array_equal(disjunct.rhs, [0.5, -3])
    np.testing.assert_array_equal(disjunct.strict, [False, True])


def test_right_hand_sides_are_rounded_up() -> None:
    for number in ("0.1", "-0.1", "0.3", "1e-400", "-1e-400", "123456789.123456789"):
        (disjunct,) = parse_vnnlib(one_input(f"(<= Y_0 {number})")).disjuncts
        assert Decimal(float(disjunct.rhs[0])) >= Decimal(number)
        assert Decimal(float(np.nextafter(disjunct.rhs[0], -np.inf))) < Decimal(number)


def test_pure_output_properties_have_no_input_part() -> None:
    assert parse_vnnlib(one_input("(<= Y_0 Y_1)")).disjuncts[0].D is None


def test_declarations_in_any_order_with_comments() -> None:
    prop = parse_vnnlib(
        "; a ( comment\n(declare-const Y_1 Real)(declare-const X_0 Real) ; )\n(declare-const Y_0 Real)\n"
        "(set-logic QF_LRA)(assert (and (<= X_0 1) (>= X_0 0)))(check-sat)"
    )
    assert (prop.num_inputs, prop.num_outputs, len(prop.disjuncts)) == (1, 2, 1)
    assert prop.disjuncts[0].C.shape == (0, 2)


@pytest.mark.parametrize("number", ["1e-3", ".001", "+.1e-2", "0.0010", "1E-03", "100e-5"])
def test_notations_of_a_number(number: str) -> None:
    assert only(parse_vnnlib(one_input(f"(<= Y_0 {number})")))[1] == Decimal("0.001")


def test_numbers_stay_exact() -> None:
    digits = "0.1234567890123456789012345678901234567890"
    assert only(parse_vnnlib(one_input(f"(>= Y_0 {digits})")))[1] == Decimal("-" + digits)
    coefficients, rhs, _ = only(parse_vnnlib(one_input(f"(<= (* 3 Y_0) (+ Y_1 {digits} 1e30))")))
    assert coefficients == {"Y_0": 3, "Y_1": -1}
    assert Fraction(rhs) == Fraction(digits) + 10**30


def test_smallest_number_on_the_right(reference: ModuleType) -> None:
    assert only(parse_vnnlib(one_input("(>= Y_0 (+ Y_1 -5e-324))")))[1] == Decimal("5e-324")
    assert only(parse_vnnlib(one_input("(>= Y_0 Y_1)")))[1] == 0


def test_equalities() -> None:
    (disjunct,) = parse_vnnlib(one_input("(= X_0 0.3)", "(= Y_0 2)")).disjuncts
    assert disjunct.box.lower == disjunct.box.upper == (Decimal("0.3"),)
    assert disjunct.terms == (({"Y_0": 1}, 2), ({"Y_0": -1}, -2))


def test_chained_comparison() -> None:
    (disjunct,) = parse_vnnlib(one_input("(<= 0 X_0 0.5)", "(> 5 Y_0 Y_1)")).disjuncts
    assert (disjunct.box.lower, disjunct.box.upper) == ((0,), (Decimal("0.5"),))
    assert disjunct.terms == (({"Y_1": 1, "Y_0": -1}, 0), ({"Y_0": 1}, 5))


def test_comparisons_of_constants_evaluate() -> None:
    assert len(parse_vnnlib(one_input("(<= 0 1)", "(or (< 1 1) (<= Y_0 0))")).disjuncts) == 1
    assert parse_vnnlib(one_input("(or (< 1 1) (= 1 2))")).disjuncts == ()
    assert parse_vnnlib(one_input("(< Y_0 Y_0)")).disjuncts == ()
    assert parse_vnnlib(one_input("(or)")).disjuncts == ()
    assert parse_vnnlib(one_input("(and)", "true")).disjuncts[0].terms == ()


def test_a_bound_that_is_no_decimal_is_widened_and_kept_as_a_row() -> None:
    (disjunct,) = parse_vnnlib(one_input("(<= (* 3 X_0) 1)")).disjuncts
    assert Fraction(1, 3) < Fraction(disjunct.box.upper[0]) < Fraction(1, 3) + Fraction(1, 10**49)
    assert disjunct.terms == (({"X_0": 3}, 1),)
    (disjunct,) = parse_vnnlib(one_input("(<= X_0 (/ 1 8))")).disjuncts
    assert disjunct.box.upper[0] == Decimal("0.125")
    assert disjunct.terms == ()


def test_strict_input_bounds_close_the_box_and_stay_as_rows() -> None:
    (disjunct,) = parse_vnnlib(one_input("(< X_0 0.5)")).disjuncts
    assert disjunct.box.upper == (Decimal("0.5"),)
    assert disjunct.terms == (({"X_0": 1}, Decimal("0.5")),)
    np.testing.assert_array_equal(disjunct.strict, [True])


# Boxes and disjuncts


def test_equal_boxes_are_one_object() -> None:
    prop = parse_vnnlib(one_input("(or (<= Y_0 0) (and (<= Y_1 0) (<= X_0 5)) (and (<= X_0 0) (<= Y_0 1)))"))
    first, second, third = prop.disjuncts
    assert first.box == second.box != third.box
    split = parse_vnnlib(
        declared(1, 1, "(or (and (<= 0 X_0 1) (<= Y_0 0)) (and (<= X_0 1.0) (>= X_0 0) (>= Y_0 9)))")
    )
    assert split.disjuncts[0].box is split.disjuncts[1].box
    assert [indices for _, indices in split.boxes()] == [[0, 1]]


def test_assertions_conjoin() -> None:
    """Trap 3: an OR, and an assertion of its own."""
    prop = parse_vnnlib(
        declared(
            *(2, 2, "(and (>= X_0 -1) (<= X_0 -0.5) (>= X_1 1) (<= X_1 2))"),
            *("(or (<= Y_0 0) (>= Y_0 5))", "(<= Y_1 0)"),
        )
    )
    assert [len(disjunct.terms) for disjunct in prop.disjuncts] == [2, 2]
    assert all(({"Y_1": 1}, 0) in disjunct.terms for disjunct in prop.disjuncts)


def test_two_disjunctions_multiply() -> None:
    prop = parse_vnnlib(one_input("(or (<= Y_0 0) (<= Y_0 1) (<= Y_0 2))", "(or (<= Y_1 0) (<= Y_1 1))"))
    assert len(prop.disjuncts) == 6


def test_boxes_inside_a_disjunction() -> None:
    """Trap 7: magnitudes that cost float32 its last digits."""
    parts = [(135845, 216892, 1419), (224027, 247495, 2942), (252460, 267771, 4464)]
    clauses = " ".join(f"(and (>= X_0 {a}) (<= X_0 {b}) (> Y_0 {c}))" for a, b, c in parts)
    prop = parse_vnnlib(declared(1, 1, f"(or {clauses})"))
    found = [(d.box.lower[0], d.box.upper[0], -d.terms[0][1]) for d in prop.disjuncts]
    assert found == parts


def test_an_empty_box_is_left_out_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        prop = parse_vnnlib(one_input("(or (and (>= X_0 2) (<= Y_0 0)) (<= Y_0 1))"), "p.vnnlib")
    assert len(prop.disjuncts) == 1
    assert caplog.messages == [
        "p.vnnlib: 1 of 2 disjuncts have an empty input set (no value is left for X_0)"
    ]


def test_nothing_is_left_of_an_empty_box_and_of_a_point_cut_off() -> None:
    assert parse_vnnlib(one_input("(>= X_0 1.0000000000000000000000000000001)")).disjuncts == ()
    assert parse_vnnlib(one_input("(> X_0 1)")).disjuncts == ()
    assert parse_vnnlib(one_input("(< X_0 1)", "(or (>= X_0 1) (>= X_0 9))")).disjuncts == ()


def test_no_depth_is_too_deep() -> None:
    depth = 30_000
    nested = "(and (or " * depth + "(<= Y_0 0)" + "))" * depth
    chain = "(and (<= Y_0 1) " * depth + "(<= Y_0 0)" + ")" * depth
    arithmetic = "(+ 1 " * depth + "Y_0" + ")" * depth
    (disjunct,) = parse_vnnlib(one_input(nested)).disjuncts
    assert len(disjunct.terms) == 1
    assert only(parse_vnnlib(one_input(chain)))[:2] == ({"Y_0": 1}, 0)  # which implies all others
    assert only(parse_vnnlib(one_input(f"(<= {arithmetic} 0)")))[1] == -depth


def test_many_disjunctions_stay_factors() -> None:
    pairs = [f"(or (<= Y_0 {i}) (<= Y_1 {-i}))" for i in range(40)]
    for assertions in (pairs, [f"(or (and {' '.join(pairs)}))"]):
        (disjunct,) = parse_vnnlib(one_input(*assertions)).disjuncts
        assert len(disjunct.rhs) == 80
        assert disjunct.groups is not None
        assert disjunct.groups.shape == (2, 80)
        assert (disjunct.groups[1] == np.arange(80) // 2 * 2).all()


def test_factors_of_inputs_become_boxes_first() -> None:
    inputs = "(or (<= X_0 -0.5) (>= X_0 0.5))"
    pairs = [f"(or (<= Y_0 {i}) (<= Y_1 {-i}))" for i in range(40)]
    prop = parse_vnnlib(one_input(inputs, *pairs))
    assert [(d.box.lower[0], d.box.upper[0]) for d in prop.disjuncts] == [
        (-1, Decimal("-0.5")),
        (Decimal("0.5"), 1),
    ]
    assert all(len(d.rhs) == 80 for d in prop.disjuncts)


def test_too_many_factors_of_inputs_become_rows_in_the_box_around_them() -> None:
    names = [f"X_{i}" for i in range(15)]
    parts = [f"(or (and (>= {x} 0) (<= {x} 1)) (and (>= {x} 2) (< {x} 3)))" for x in names]
    prop = parse_vnnlib(declared(15, 1, *parts, "(<= Y_0 0)"))
    boxes = {(d.box.lower, d.box.upper) for d in prop.disjuncts}
    assert len(prop.disjuncts) == len(boxes) == 512
    assert all(low[9:] == (0,) * 6 and high[9:] == (3,) * 6 for low, high in boxes)
    assert all(d.D is not None and d.groups is not None for d in prop.disjuncts)


def test_what_follows_from_other_constraints_is_dropped() -> None:
    follows = ["(<= Y_0 1)", "(<= Y_0 2)", "(or (<= Y_0 1.5) (>= Y_1 0))", "(or (<= Y_1 7) (< Y_0 3))"]
    assert only(parse_vnnlib(one_input(*follows)))[:2] == ({"Y_0": 1}, 1)
    (disjunct,) = parse_vnnlib(one_input("(<= Y_0 1)", "(or (> Y_0 1) (<= Y_1 0))")).disjuncts
    assert [row for row, _ in disjunct.terms] == [{"Y_0": 1}, {"Y_1": 1}]
    prop = parse_vnnlib(one_input("(or (<= Y_0 0) (and (<= Y_0 0) (<= Y_1 0)) (<= Y_0 0))"))
    assert len(prop.disjuncts) == 1
    assert parse_vnnlib(one_input("(<= Y_0 1)", "(>= Y_0 1.5)")).disjuncts == ()
    assert parse_vnnlib(one_input("(< (- Y_0 Y_1) 1)", "(>= (- Y_0 Y_1) 1)")).disjuncts == ()
    assert len(parse_vnnlib(one_input("(<= (- Y_0 Y_1) 1)", "(>= (- Y_0 Y_1) 1)")).disjuncts) == 1


def test_depth_that_cannot_be_multiplied_out_is_refused() -> None:
    pairs = " ".join(f"(or (<= Y_0 {i}) (<= Y_1 {-i}))" for i in range(7))
    text = "(or (<= Y_0 -9) (and " * 17 + pairs + f" {pairs}))" * 17
    with pytest.raises(LoadError, match=r"<text>:6:\d+: 'and' and 'or' are nested more than 16 times"):
        parse_vnnlib(one_input(text))


# Errors

HEAD = "(declare-const X_0 Real)\n(declare-const Y_0 Real)\n(assert (<= 0 X_0 1))\n"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("(assert ((<= Y_0 1)))", "4:9: an operator is missing: a parenthesis follows a parenthesis"),
        ("(assert (or ((<= Y_0 1)) (>= Y_0)))", "4:13: an operator is missing"),
        ("(assert (or (<= Y_0 1) (>= Y_0)))", "4:24: '>=' needs two operands, found 1"),
        ("(assert (<=))", "4:9: '<=' needs two operands, found 0"),
        ("(assert (<= Y_0 (+)))", "4:17: '+' needs operands, found none"),
        ("(assert ())", "4:9: empty parentheses"),
        ("(assert (<= Y_0 1)", "4:1: this parenthesis is never closed"),
        ("(assert (<= Y_0 1)\n(assert (<= Y_0 2))", "5:2: 'assert' inside another list: is a ')' missing"),
        ("(assert (<= Y_0 1)))", "4:20: this parenthesis closes nothing"),
        ("(assert (<= Y_0 1)) oops", "4:21: 'oops' stands outside of any parentheses"),
        ("(assert (<= (+ 1 X_0) Y_7)) ; x", "4:23: the variable 'Y_7' is not declared"),
        ("(assert (<= Y_0 Y_7))", "4:17: the variable 'Y_7' is not declared"),
        ("(assert (<= Z_0 1))", "4:13: 'Z_0' is neither a declared variable nor a number"),
        ("(assert (<= Y_0 1.2.3))", "4:17: '1.2.3' is neither a declared variable nor a number"),
        ("(assert (<= Y_0 nan))", "4:17: 'nan' is not a finite number"),
        ("(assert (<= Y_0 -Infinity))", "4:17: '-Infinity' is not a finite number"),
        ("(assert (<= Y_0 1_000))", "4:17: '1_000' is not a finite number"),
        ("(assert (<= Y_0 1e309))", "4:17: the number '1e309' is outside the range of float64"),
        ("(assert (<= Y_0 1e-99999))", "4:17: the number '1e-99999' is outside the range of float64"),
        ("(assert (<= (* X_0 Y_0) 1))", "4:13: product of two expressions that both contain variables"),
        ("(assert (<= (/ 1 Y_0) 1))", "4:13: division by an expression that contains variables"),
        ("(assert (<= (/ Y_0 0) 1))", "4:13: division by zero"),
        ("(assert (<= (/ 3) 1))", "4:13: '/' needs at least two operands, found 1"),
        ("(assert (<= Y_0 (* 1e300 1e300)))", "4:9: the constants combine to a number outside the range"),
        ("(assert (<= (<= Y_0 1) 1))", "4:13: a formula where a number, a variable or arithmetic"),
        ("(assert (and (<= Y_0 1) Y_0))", "4:25: operand of 'and' is not a comparison, 'and' or 'or'"),
        ("(assert (+ Y_0 1))", "4:9: operand of 'assert' is not a comparison, 'and' or 'or'"),
        ("(assert (<= Y_0 1) (<= Y_0 2))", "4:1: 'assert' takes one formula, found 2"),
        ("(assert)", "4:1: 'assert' takes one formula, found 0"),
        ("(assert (not (<= Y_0 1)))", "4:10: unknown operator 'not'"),
        ("(push 1)", "4:2: unknown command 'push': expected declare-const or assert"),
        ("(declare-const Y_0 Real)", "4:16: the variable 'Y_0' is declared twice"),
        ("(declare-const Z Real)", "4:16: the variable 'Z' is neither an input X_i nor an output Y_i"),
        ("(declare-const X_01 Real)", "4:16: the variable 'X_01' is neither"),
        ("(declare-const X_1 Int)", "4:1: expected (declare-const NAME Real)"),
    ],
)
def test_errors_say_where(line: str, message: str) -> None:
    with pytest.raises(LoadError) as caught:
        parse_vnnlib(HEAD + line, "p.vnnlib")
    assert str(caught.value).startswith(f"p.vnnlib:{message}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (declared(2, 1, "(<= 0 X_0 1)", "(<= X_1 1)"), "p: the input X_1 has no lower bound"),
        (declared(1, 1, "(>= X_0 1)"), "p: the input X_0 has no upper bound"),
        (declared(1, 1, "(<= 0 X_0 1)") + "(declare-const X_2 Real)", "X_1 is not among them"),
        (declared(0, 1), "p: no input X_0 is declared"),
        (declared(1, 0), "p: no output Y_0 is declared"),
        ("", "p: no input X_0 is declared"),
    ],
)
def test_incomplete_properties_are_refused(text: str, message: str) -> None:
    with pytest.raises(LoadError, match=message):
        parse_vnnlib(text, "p")


def test_places_survive_a_long_text() -> None:
    """More than one chunk of tokens before the error, and columns after a comment's line."""
    filler = "(assert (<= Y_0 123456789)) ; comment )(\n" * 60_000
    with pytest.raises(LoadError, match=r"^p:60004:17: 'x' is neither"):
        parse_vnnlib(HEAD + filler + "(assert (<= Y_0 x))", "p")


# Files


def test_compressed_files(tmp_path: Path) -> None:
    text = one_input("(<= Y_0 Y_1)")
    (tmp_path / "p.vnnlib").write_text(text)
    (tmp_path / "p.vnnlib.gz").write_bytes(gzip.compress(text.encode()))
    plain, packed = (load_vnnlib(tmp_path / name) for name in ("p.vnnlib", "p.vnnlib.gz"))
    assert plain.disjuncts[0].terms == packed.disjuncts[0].terms
    assert plain.source.endswith("p.vnnlib")


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", gzip.compress(b"(" * 99)[:-9], b"\x1f\x8bnonsense"])
def test_unreadable_files(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "p.vnnlib"
    path.write_bytes(content)
    with pytest.raises(LoadError, match=r"p.vnnlib: cannot read the property: "):
        load_vnnlib(path)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"none.vnnlib: cannot read the property: No such file"):
        load_vnnlib(tmp_path / "none.vnnlib")


def test_sizes_are_compared_in_words() -> None:
    prop = parse_vnnlib(one_input(), "p")
    check_sizes(prop, 1, 2)
    with pytest.raises(LoadError, match="p: the property declares 1 inputs, but the network has 5"):
        check_sizes(prop, 5, 2)
    with pytest.raises(LoadError, match="p: the property declares 2 outputs, but the network has 10"):
        check_sizes(prop, 1, 10)
