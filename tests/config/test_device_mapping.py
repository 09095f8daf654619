"""`device_mapping`'s grammar: the seeds' examples, Python's own meaning, and strings that mean harm."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll_core.spec.devices import MAX_SLOTS, parse_device_mapping
from roll_testing.errors import raises_error


@pytest.mark.parametrize(
    ("text", "slots"),
    [
        ("list(range(0,16))", tuple(range(16))),
        ("list(range(16,24))", tuple(range(16, 24))),
        ("list(range(0,8))", tuple(range(8))),
        ("list(range(0,12))", tuple(range(12))),
        ("list(range(0, 4)) + list(range(8, 12))", (0, 1, 2, 3, 8, 9, 10, 11)),
        ("list(range(4))+[7]+range(10,8,-1)", (0, 1, 2, 3, 7, 10, 9)),
        ("[0, 2, 4,]", (0, 2, 4)),
        (" range ( 0 , 6 , 2 ) ", (0, 2, 4)),
        ("list(range(0,0)) + [3]", (3,)),
        ("[] + [5]", (5,)),
    ],
)
def test_expressions_of_the_seeds_and_their_kin(text, slots):
    assert parse_device_mapping(text) == slots


def test_a_list_is_taken_as_it_is():
    assert parse_device_mapping([3, 1, 2]) == (3, 1, 2)
    assert parse_device_mapping((0,)) == (0,)


@st.composite
def terms(draw):
    kind = draw(st.sampled_from(["list", "range", "brackets"]))
    if kind == "brackets":
        return "[" + ", ".join(map(str, draw(st.lists(st.integers(-2, 60), max_size=5)))) + "]"
    bounds = draw(st.lists(st.integers(-5, 60), min_size=1, max_size=3))
    inner = f"range({', '.join(map(str, bounds))})"
    return f"list({inner})" if kind == "list" else inner


@settings(max_examples=600)
@given(parts=st.lists(terms(), min_size=1, max_size=4), spaces=st.lists(st.sampled_from(["", " ", "  "]), min_size=4))
def test_expression_equals_python_or_is_refused_with_reason(parts, spaces):
    text = "".join(f"{space}{part}{space}+" for part, space in zip(parts, spaces, strict=False)).rstrip("+")
    used = text.split("+")
    try:
        expected = [slot for part in used for slot in list(eval(part.strip()))]
    except ValueError:  # range's step of 0
        expected = None
    lawful = expected and min(expected) >= 0 and len(set(expected)) == len(expected)
    if lawful:
        assert parse_device_mapping(text) == tuple(expected)
    else:
        with pytest.raises(ValueError, match=r"step|no slot|counted from 0|twice"):
            parse_device_mapping(text)


def test_a_list_of_a_list_is_that_list():
    assert parse_device_mapping("list([0,1,2]) + list([5])") == (0, 1, 2, 5)


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('rm -rf /')",
        "list(range(0,8)) if True else []",
        "[x for x in range(8)]",
        "list(map(int, '123'))",
        "range(0,8).__class__",
        "list(range(0,8)); import os",
        "list(range(0,8))\nimport os",
        "(lambda: [0])()",
        "range(*[1,2])",
        "range(stop=3)",
        "range(0, 2**10)",
        "[0] * 3",
        "[0] - [0]",
        "[[0]]",
        "[0.5]",
        "['0']",
        "[True]",
        "[0,,1]",
        "[,]",
        "[0 1]",
        "range()",
        "range(1,2,3,4)",
        "list()",
        "list([0)]",
        "list([0] + [1])",
        "list(list(range(2)))",
        "list(range(0,8)",
        "list(range(0,8)))",
        "+ [0]",
        "[0] +",
        "[0] + + [1]",
        "",
        "   ",
        "\x00",
        "[0]\x00",
        "rangе(0,2)",
        "［0］",
        "[٣]",
        "[１]",
        "[0]\u200b",
        "range(0,1e3)",
        "range(0,0x10)",
        "range(0,1_0)",
        "[-1]",
        "[0, 0]",
        "range(5,0)",
        "range(0,5,0)",
        f"range(0,{MAX_SLOTS + 1})",
        "range(0,999999999)",
        "range(0,99999999999999999999)",
        "[" * 5000,
        "range(" * 5000,
    ],
)
def test_invalid_mapping_is_refused(text):
    with raises_error(ValueError):
        parse_device_mapping(text)


@pytest.mark.parametrize("value", [None, 3, 1.5, True, {"a": 1}, [True], ["0"], [0.0], [None], [[0]], b"[0]", []])
def test_other_values_are_refused(value):
    with raises_error(ValueError, "device_mapping"):
        parse_device_mapping(value)


def test_a_huge_sum_is_refused_before_it_fills_the_memory():
    text = "+".join([f"range(0,{MAX_SLOTS})"] * 2000)
    with raises_error(ValueError, "1000000"):
        parse_device_mapping(text)


@settings(max_examples=500)
@given(text=st.text(max_size=30) | st.text(alphabet="listrange()[],+-0123456789 ", max_size=30))
def test_any_text_is_slots_or_a_value_error(text):
    try:
        slots = parse_device_mapping(text)
    except ValueError:
        return
    assert slots
    assert all(type(slot) is int and slot >= 0 for slot in slots)


def test_error_locates_the_place_in_the_expression():
    with raises_error(ValueError, "14"):
        parse_device_mapping("list(range(0,x8))")
