"""Reward `code`: forms of tests, comparison of outputs, values and failures."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from pydantic import ValidationError

from roll_core.errors import ConfigError, DataError, RewardFailure
from roll_rewards import guest, sandbox
from roll_rewards.code import CodeReward
from roll_rewards.code_tests import (
    CallTest,
    CodeTest,
    StdinTest,
    last_program,
    read_tests,
    same_text,
    same_value,
)
from roll_rewards.config import CodeConfig, CompositeConfig

NEEDS_ISOLATION = pytest.mark.skipif(bool(sandbox.probe()), reason=f"no isolation on this host: {sandbox.probe()}")


def fenced(program):
    return f"Here it is:\n```python\n{program}\n```\nDone."


# -- programs ----------------------------------------------------------------------------------------------------------


def test_the_last_block_of_python_is_the_program():
    text = "```python\na\n```\ntext\n```py\nb\n```\n```json\n{}\n```"
    assert last_program(text) == "b\n"
    assert last_program("<think>```python\nx\n```</think> none") is None
    assert last_program("print(1)") is None
    assert last_program("print(1)", require_code_block=False) == "print(1)"
    assert last_program("```python\nnever closed") is None
    assert last_program("```\r\nprint(1)\r\n```\r\n") == "print(1)\n"
    assert last_program("") is None


def test_megabyte_of_fences_parses_fast():
    assert last_program("```" * 350_000) is None
    assert last_program("```\n" * 250_000) == ""


# -- forms of tests ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        ({"inputs": ["1 2\n"], "outputs": ["3\n"]}, StdinTest("1 2\n", "3\n")),
        ({"inputs": [["1", "2"]], "outputs": [["3"]]}, StdinTest("1\n2", "3")),
        ({"fn_name": "f", "inputs": [[1, 2]], "outputs": [3]}, CallTest("f", (1, 2), (3,))),
        ({"fn_name": "f", "inputs": [[1, 2]], "outputs": [[3]]}, CallTest("f", (1, 2), ([3], 3))),
        ([{"input": "1", "output": "2", "testtype": "stdin"}], StdinTest("1", "2")),
        (
            [{"input": "[1]\n2", "output": "[2]", "testtype": "functional", "fn_name": "f"}],
            CallTest("f", ([1], 2), ([2],)),
        ),
        ([{"stdin": "1", "expected_stdout": "2"}], StdinTest("1", "2")),
        (["assert f(1) == 2"], CodeTest("assert f(1) == 2", "")),
        ([{"assert_code": "def test_f(): assert f(1) == 2"}], CodeTest("def test_f(): assert f(1) == 2", "")),
        (
            "def check(candidate):\n    assert candidate(1) == 2",
            CodeTest("def check(candidate):\n    assert candidate(1) == 2", ""),
        ),
    ],
)
def test_forms_of_data_sets_are_read(column, expected):
    assert read_tests(column) == [expected]
    assert read_tests(json.dumps(column)) == [expected]


@pytest.mark.parametrize(
    "column",
    [
        None,
        [],
        "",
        "[]",
        7,
        math.nan,
        [None],
        [{}],
        [{"input": "1"}],
        {"inputs": ["1"], "outputs": []},
        {"inputs": "1", "outputs": "2"},
        {"fn_name": "f", "inputs": [1], "outputs": [1]},
        [{"input": "1", "output": "2", "testtype": "functional"}],
        [{"fn_name": "f", "input": "1", "output": "{"}],
        [{"input": "1", "output": " \n"}],
        {"inputs": [{}], "outputs": [{}]},
    ],
)
def test_rows_without_usable_tests_are_refused(column):
    with pytest.raises(ValueError):  # noqa: PT011
        read_tests(column)


# -- tests that are large, or that cannot run --------------------------------------------------------------------------


TOTAL = fenced("def total(values):\n    return sum(values)")
LARGE = 200_000  # 1.5 MB of JSON, more than output_limit_kb


@NEEDS_ISOLATION
@pytest.mark.parametrize(
    "tests",
    [
        [f"assert total(list(range({LARGE}))) == {sum(range(LARGE))}"],
        {"fn_name": "total", "inputs": [[list(range(LARGE))]], "outputs": [sum(range(LARGE))]},
    ],
)
def test_arguments_are_no_output_of_the_program(reward, requesting, tests):
    made = reward(CodeReward, CodeConfig, "code")
    assert made.score(requesting(TOTAL, test_cases=tests)).value == 1.0


@NEEDS_ISOLATION
@pytest.mark.parametrize(
    "test",
    [
        "class TestTotal:\n    def test_it(self):\n        assert total([1]) == 2",
        "async def test_it():\n    assert total([1]) == 2",
        "def test_it(fixture):\n    assert total([1]) == 1",
    ],
)
def test_tests_that_cannot_run_are_failures(reward, requesting, test):
    made = reward(CodeReward, CodeConfig, "code")
    with pytest.raises(RewardFailure):
        made.score(requesting(TOTAL, test_cases=[f"assert total([1]) == 1\n{test}"]))


@NEEDS_ISOLATION
def test_a_class_that_helps_the_tests_is_usable(reward, requesting):
    made = reward(CodeReward, CodeConfig, "code")
    test = "class Runner:\n    def test_it(self):\n        assert total([1]) == 1\nRunner().test_it()"
    assert made.score(requesting(TOTAL, test_cases=[test])).value == 1.0


# -- comparison --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "expected", "tolerance", "same"),
    [
        ("1 2\n3\n", "1 2 \n3", 0, True),
        ("1\n2", "1 2", 0, False),
        ("1.0", "1", 0, True),
        ("0.3333", "0.3334", 0, False),
        ("0.3333", "0.3334", 1e-3, True),
        ("1e999999999", "1e999999998", 1e-3, False),
        ("nan", "nan", 0, True),
        ("NaN", "nan", 1e-3, False),
        ("Yes", "YES", 0, False),
        ("", "1", 0, False),
        ("5 5", "5", 0, False),
        ("٣", "3", 0, True),
    ],
)
def test_outputs_compare_by_lines_and_numbers(found, expected, tolerance, same):
    assert same_text(found, expected, tolerance) is same


@pytest.mark.parametrize(
    ("found", "expected", "tolerance", "same"),
    [
        (3, 3, 0, True),
        (3.0, 3, 0, True),
        (True, 1, 0, False),
        (1, True, 0, False),
        ((1, (2,)), [1, [2]], 0, True),
        ([1], [1, 2], 0, False),
        ({1: "a"}, {"1": "a"}, 0, True),
        ({"1": "a", "2": "b"}, {"1": "a"}, 0, False),
        ({1, 2}, [1, 2], 0, False),
        (None, None, 0, True),
        (None, 0, 0, False),
        ("3", 3, 0, False),
        (0.1 + 0.2, 0.3, 0, False),
        (0.1 + 0.2, 0.3, 1e-9, True),
        (math.nan, math.nan, 1e-9, False),
    ],
)
def test_values_compare_as_json(found, expected, tolerance, same):
    assert same_value(found, expected, tolerance) is same


@pytest.mark.parametrize(
    "value", [0, -(2**70), 1.5, "é\ud800", b"\x00", [(1,), {2}], {(1, 2): {"a": None}}, frozenset("a"), 1j, True]
)
def test_values_survive_the_way_between_boxes(value):
    data = json.loads(json.dumps(guest.encode(value, [])))
    found = guest.decode(data, lambda _: None)
    assert found == value
    assert type(found) is type(value)


# -- scores ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def scored(reward, requesting):
    def score(program, tests, *, raw=False, row=None, **options):
        code = reward(CodeReward, CodeConfig, "code", **options)
        return code.score(requesting(program if raw else fenced(program), test_cases=tests, **(row or {})))

    return score


@NEEDS_ISOLATION
def test_soft_is_the_share_of_passed_tests_and_hard_needs_all(scored):
    tests = [{"input": str(n), "output": str(n * n)} for n in range(1, 5)]  # n * n == 2 n for 2 alone of these
    soft = scored("print(2 * int(input()))", tests, reward_type="soft")
    assert (soft.value, soft.detail["passed"]) == (0.25, 0.25)
    assert scored("print(2 * int(input()))", tests).value == 0.0
    assert scored("print(int(input()) ** 2)", tests).value == 1.0


@NEEDS_ISOLATION
def test_solutions_in_the_forms_of_data_sets_score(scored):
    call = {"fn_name": "twice", "inputs": [[[1, 2]]], "outputs": [[2, 4]]}
    method = "class Solution:\n    def twice(self, xs):\n        return tuple(2 * x for x in xs)"
    assert scored(method, call).value == 1.0
    check = "def check(candidate):\n    assert candidate(3) == 6\n    assert candidate('a') == 'aa'"
    assert scored("def twice(x): return 2 * x", check, row={"fn_name": "twice"}).value == 1.0
    assert scored("def twice(x): return x", check, row={"fn_name": "twice"}).value == 0.0
    pytest_form = (
        "import pytest\nfrom solution import Stack, fill\n"
        "@pytest.mark.parametrize('n', [1, 2])\ndef test_stack(n):\n"
        "    stack = Stack(n)\n    stack.push(5)\n    assert stack.items == [5]\n    assert len(stack) == 1\n"
        "    with pytest.raises(ValueError):\n        stack.push(-1)\n"
        "def test_in_place():\n    xs = [1]\n    fill(xs)\n    assert xs == [1, 0]\n"
    )
    stack = (
        "class Stack:\n    def __init__(self, n): self.items = []\n    def __len__(self): return len(self.items)\n"
        "    def push(self, x):\n        if x < 0: raise ValueError(x)\n        self.items.append(x)\n"
        "def fill(xs): xs.append(0)"
    )
    assert scored(stack, [{"assert_code": pytest_form}]).value == 1.0
    assert scored(stack.replace("raise ValueError(x)", "pass"), [{"assert_code": pytest_form}]).value == 0.0
    assert scored(stack.replace("xs.append(0)", "xs.append(1)"), [{"assert_code": pytest_form}]).value == 0.0


@NEEDS_ISOLATION
def test_threads_prints_and_exits_of_programs_are_supported(scored):
    program = (
        "import sys, threading\nsys.setrecursionlimit(10**6)\nthreading.stack_size(1 << 26)\n"
        "def main():\n    print(int(input()) + 1)\nthreading.Thread(target=main).start()"
    )
    assert scored(program, [{"input": "1", "output": "2"}]).value == 1.0
    assert scored("print(input()); exit()", [{"input": "ü€", "output": "ü€"}]).value == 1.0
    noisy = "def f(x):\n    print('{\"value\": 9}')\n    return x"
    assert scored(noisy, {"fn_name": "f", "inputs": [[1]], "outputs": [1]}).value == 1.0


@NEEDS_ISOLATION
@pytest.mark.parametrize(
    "response", ["", "\x00", "```\n\n```", "``" * 100, "\ud800", "```python\n\x00\n```", "x" * 10**6]
)
def test_a_response_without_a_program_gets_0(scored, response):
    assert scored(response, [{"input": "1", "output": "2"}], raw=True).value == 0.0


@NEEDS_ISOLATION
def test_long_inputs_reach_the_program_and_long_outputs_return(scored):
    numbers = " ".join(map(str, range(100_000)))
    tests = [{"input": numbers, "output": numbers[::-1]}]
    assert scored("print(input()[::-1])", tests).value == 1.0
    assert scored("print(1)", tests).value == 0.0  # closes its input early


@NEEDS_ISOLATION
def test_rows_without_tests_and_broken_tests_are_failures(reward, requesting):
    code = reward(CodeReward, CodeConfig, "code")
    with pytest.raises(DataError):
        code.score(requesting(fenced("print(1)"), other=1))
    with pytest.raises(DataError):
        code.score(requesting(fenced("print(1)"), test_cases=[]))
    for tests in ("assert f( == 1", "import no_such_package\nassert f(1) == 1", "assert True"):
        with pytest.raises(RewardFailure):
            code.score(requesting(fenced("def f(x): return 1"), test_cases=[tests]))
    arrays = {"inputs": np.array(["1"]).tolist(), "outputs": ["1"]}
    assert code.score(requesting(fenced("print(input())"), test_cases=arrays)).value == 1.0


@pytest.mark.parametrize(
    "tests",
    [
        5,
        [],
        [{"input": "1"}],
        [{"input": "1", "output": ""}],
        {"inputs": ["1"], "outputs": []},
        {"fn_name": "f", "inputs": ["[1"], "outputs": ["1"]},
        ["assert f( == 1"],
    ],
)
def test_check_finds_malformed_tests_before_a_run(tests):
    good = {"test_cases": [{"input": "1", "output": "1"}]}
    config = CodeConfig(reward="code")
    assert config.check_row(good) == {}
    assert set(config.check_row({"test_cases": tests})) == {"test_cases"}
    both = CompositeConfig(reward="composite", components={"right": config})
    assert set(both.check_row({"test_cases": tests})) == {"components.right.test_cases"}


def test_memory_limit_below_an_interpreter_is_refused():
    with pytest.raises(ValidationError) as caught:
        CodeConfig(reward="code", memory_limit_mb=1)
    assert [each["loc"] for each in caught.value.errors()] == [("memory_limit_mb",)]


@NEEDS_ISOLATION
def test_the_least_memory_runs_a_program(scored):
    program = "import collections, heapq, math, random, re\nx = bytearray(8 << 20)\nprint(input())"
    assert scored(program, [{"input": "1", "output": "1"}], memory_limit_mb=64).value == 1.0


@NEEDS_ISOLATION
def test_a_limit_of_time_that_no_program_keeps_is_located(reward):
    def start():  # on a busy host a program may end before its keeper looks at the clock
        for n in range(1, 30):
            reward(CodeReward, CodeConfig, "code", case_timeout_s=n * 1e-6)

    with pytest.raises(ConfigError) as caught:
        start()
    assert [each.key for each in caught.value.problems] == ["case_timeout_s"]


@NEEDS_ISOLATION
def test_time_runs_out_as_a_failure_only_if_no_test_failed(scored):
    slow = "import time; time.sleep(0.4); print(input())"
    tests = [{"input": str(n), "output": str(n)} for n in range(9)]
    with pytest.raises(RewardFailure):
        scored(slow, tests, timeout_s=0.5)
    wrong = [{"input": "1", "output": "2"}, *tests]
    assert scored(slow, wrong, timeout_s=0.5, reward_type="soft").value < 0.5


@pytest.mark.parametrize("command", [["/no/such/docker"], ["false"], ["echo", "no daemon"]])
def test_command_without_interpreter_fails_before_scoring(reward, command):
    with pytest.raises(ConfigError) as caught:
        reward(CodeReward, CodeConfig, "code", sandbox_command=command)
    assert [(each.key, each.code) for each in caught.value.problems] == [("sandbox_command", "ROLL-C041")]


def test_check_finds_a_command_that_is_not_installed():
    config = CodeConfig(reward="code", sandbox_command=["/no/such/docker"])
    assert set(config.check_code(None, 1.0)) == {"sandbox_command"}


@NEEDS_ISOLATION
def test_a_killed_server_is_replaced(reward, requesting):
    code = reward(CodeReward, CodeConfig, "code")
    tests = [{"input": "1", "output": "1"}]
    assert code.score(requesting(fenced("print(input())"), test_cases=tests)).value == 1.0
    code._sandbox._server._process.kill()
    code._sandbox._server._process.wait()
    assert code.score(requesting(fenced("print(input())"), test_cases=tests)).value == 1.0


# -- forms of programs -------------------------------------------------------------------------------------------------

PRINT = "```python\nprint(1)\n```"


@pytest.mark.parametrize(
    ("response", "program"),
    [
        (f"{PRINT}\nOutput:\n```\n1\n```", "print(1)\n"),
        (f"{PRINT}\nOutput:\n~~~\n1\n~~~", "print(1)\n"),
        (f"{PRINT}\n```text\n1\n```", "print(1)\n"),
        ("```\nprint(1)\n```", "print(1)\n"),
        ("1. Code:\n   ```python\n   print(1)\n   ```", "print(1)\n"),
        ("10. Code:\n\n    ```python\n    print(1)\n    ```", "print(1)\n"),
        ("- ```python\n  if 1:\n      print(1)\n  ```", "if 1:\n    print(1)\n"),
        (
            "* a\n    * b\n\n        ```py\n        if 1:\n\n            print(1)\n        ```",
            "if 1:\n\n    print(1)\n",
        ),
        ("\t```python\n\tif 1:\n\t\tprint(1)\n\t```", "if 1:\n\tprint(1)\n"),
        ("> ```python\n> if 1:\n>     print(1)\n> ```", "if 1:\n    print(1)\n"),
        ("   ```python\nprint(1)\n```", "print(1)\n"),
        ("````python\nx = '''\n```\n'''\n````", "x = '''\n```\n'''\n"),
        ("```python\ndef f():\n    '''\n    ```\n    '''\n```", "def f():\n    '''\n    ```\n    '''\n"),
        ("~~~python\nprint(1)\n~~~", "print(1)\n"),
        ("```python title='a.py'\nprint(1)\n```", "print(1)\n"),
        ("```Python3\nprint(1)\n```", "print(1)\n"),
        ("```{python}\nprint(1)\n```", "print(1)\n"),
        ("```print(1)```\nis a program", None),
        (f"{PRINT}\nand ```print(2)``` is not", "print(1)\n"),
    ],
)
def test_a_program_is_found_wherever_its_block_stands(response, program):
    assert last_program(response) == program


@pytest.mark.parametrize(("found", "expected"), [("1_000", "1000"), ("1000", "1_000"), ("0.1_5", "0.15")])
def test_digits_with_underscores_are_no_number(found, expected):
    assert not same_text(found, expected)


def test_rows_with_long_integers_are_read():
    digits = "7" * 5000
    value = int(digits[:2500]) * 10**2500 + int(digits[2500:])
    columns = f'{{"fn_name": "f", "inputs": [[{digits}]], "outputs": [{digits}]}}'
    assert read_tests(columns) == [CallTest("f", (value,), (value,))]
    assert read_tests(f'{{"inputs": ["1"], "outputs": [{digits}]}}') == [StdinTest("1", digits)]
    rows = [{"input": digits, "output": digits, "testtype": "functional", "fn_name": "f"}]
    assert read_tests(rows) == [CallTest("f", (value,), (value,))]
    assert CodeConfig(reward="code").check_row({"test_cases": [f"assert f(1) == {digits}"]}) == {}


@NEEDS_ISOLATION
@pytest.mark.parametrize(
    ("program", "tests"),
    [
        ("print(10**9999 + int(input()))", [{"input": "0", "output": "1" + "0" * 9999}]),
        ("print(len(input()), int('9' * 5000) % 7)", [{"input": "x" * 5000, "output": f"5000 {(10**5000 - 1) % 7}"}]),
        ("def f(n): return 10**n", {"fn_name": "f", "inputs": [[5000]], "outputs": [10**5000]}),
        ("def f(n): return 10**n", [f"assert f(5000) == 1{'0' * 5000}"]),
        ("def f(n): return 10**n", ["assert str(f(5000)) == '1' + 5000 * '0'"]),
    ],
)
def test_programs_with_long_integers_score(scored, program, tests):
    assert scored(program, tests).value == 1.0


@NEEDS_ISOLATION
@pytest.mark.parametrize(
    "program",
    [
        "def f(xs: List[int]) -> Optional[int]:\n    c = defaultdict(int)\n    return min(inf, sum(xs)) + c[0]",
        "class Solution:\n    @lru_cache(None)\n    def g(self, n): return math.gcd(n, 0)\n"
        "    def f(self, xs): return reduce(lambda a, b: a + b, map(self.g, xs))",
        "def f(xs):\n    heapify(xs)\n    return sum(heappop(xs) for _ in range(2))",
        "def f(xs): return collections.Counter(xs).total() + ceil(xs[0]) + deque(xs)[1] - 2",
        "def f(xs): return g(3000) + sum(xs)\ndef g(n): return 0 if n == 0 else g(n - 1)",
        "from math import *\ndef f(xs): return pow(floor(2.5), 1) + len(list(accumulate(xs))) - 1",
    ],
)
def test_names_of_livecodebench_need_no_import(scored, program):
    assert scored(program, {"fn_name": "f", "inputs": [[[1, 2]]], "outputs": [3]}).value == 1.0


@NEEDS_ISOLATION
def test_a_name_of_the_program_comes_before_the_prelude(scored):
    assert scored("inf = 3\ndef gcd(a, b): return inf", ["assert gcd(1, 2) == 3"]).value == 1.0
    assert scored("pow = 3\nprint(pow)", [{"input": "1", "output": "3"}]).value == 1.0
    assert scored("print(pow(2, 3, 5))", [{"input": "1", "output": "3"}]).value == 1.0
    assert scored("def f(): return 0.1 + 0.2", ["assert math.isclose(f(), 0.3)"]).value == 1.0
    assert scored("print(no_such_name)", [{"input": "1", "output": "3"}]).value == 0.0


# -- checks of test code -----------------------------------------------------------------------------------------------


@NEEDS_ISOLATION
@pytest.mark.parametrize(
    ("test", "wrong"),
    [
        ("for got, want in zip(f(), [1, 2]):\n    assert got == want", "[]"),
        ("def test_f():\n    for got in f():\n        if got != 1:\n            raise ValueError", "[]"),
        ("import unittest\nfor got in f():\n    unittest.TestCase().assertEqual(got, 1)", "()"),
        ("def check(candidate):\n    for got, want in zip(candidate(), [1, 2]):\n        assert got == want", "{}"),
        ("def test_f():\n    assert f() == [1, 2]\n    yield", "[1, 2]"),
    ],
)
def test_test_code_that_compares_nothing_does_not_pass(reward, requesting, test, wrong):
    code = reward(CodeReward, CodeConfig, "code")
    given = requesting(fenced(f"def f(): return {wrong}"), test_cases=[test], fn_name="f")
    if "yield" in test:
        with pytest.raises(RewardFailure):
            code.score(given)
    else:
        assert code.score(given).value == 0.0


@NEEDS_ISOLATION
@pytest.mark.parametrize(
    "test",
    [
        "try:\n    f(-1)\n    assert False\nexcept ValueError:\n    pass",
        "import pytest\nwith pytest.raises(ValueError):\n    f(-1)",
        "f(1)",
        "assert f(1), 'no value'",
        "class Box:\n    def same(self):\n        assert f(1).items == [1]\nBox().same()",
        "if not f(1):\n    raise ValueError",
        "assert list(reversed(f(1))) == [1]",
    ],
)
def test_checks_that_right_programs_pass(scored, test):
    program = (
        "class Bag:\n    items = [1]\n    def __len__(self): return 1\n"
        "    def __getitem__(self, at): return self.items[at]\n"
        "def f(x):\n    if x < 0: raise ValueError(x)\n    return Bag()"
    )
    assert scored(program, [test]).value == 1.0


@NEEDS_ISOLATION
def test_an_object_without_a_length_is_true(scored):
    node = "class Node:\n    def __init__(self, next=None): self.next = next\ndef f(): return Node(Node())"
    test = "node, n = f(), 0\nwhile node:\n    node, n = node.next, n + 1\nassert n == 2"
    assert scored(node, [test]).value == 1.0


@NEEDS_ISOLATION
def test_a_value_that_breaks_the_tests_is_a_0(scored):
    assert scored("def f(): return '(('", ["assert eval(f()) == 1"]).value == 0.0
    assert scored("def f(): return 'nowhere'", ["import importlib\nimportlib.import_module(f())"]).value == 0.0


@NEEDS_ISOLATION
def test_an_exception_without_a_text_can_be_expected(scored):
    program = "class E(ValueError):\n    def __str__(self): raise TypeError\ndef f(): raise E"
    assert scored(program, ["import pytest\nwith pytest.raises(ValueError):\n    f()"]).value == 1.0


@pytest.mark.parametrize(
    ("response", "program"),
    [
        (f"<think>\nMaybe\n{PRINT}\nno, that fails for", None),
        (f"[THINK]{PRINT}", None),
        (f"analysisMaybe\n{PRINT}", None),
        (f"[THINK]```python\nprint(2)\n```[/THINK]\n{PRINT}", "print(1)\n"),
        (f"analysisMaybe```assistantfinal{PRINT}", "print(1)\n"),
        ("```python\nprint('<think>')\n```", "print('<think>')\n"),
    ],
)
def test_a_program_in_the_reasoning_does_not_count(response, program):
    assert last_program(response) == program
