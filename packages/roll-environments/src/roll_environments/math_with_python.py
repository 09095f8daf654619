"""`math_with_python`: arithmetic that needs a calculator. The tool `python` evaluates expressions."""

from __future__ import annotations

import math
import random
import re
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import override

from roll_core.spec.environment import Environment, Opening, Turn
from roll_environments.arithmetic import ExpressionError, evaluate
from roll_environments.tool_calls import ToolCallError, correction, tool_calls, tool_schema, tool_turn

if TYPE_CHECKING:
    from roll_core.spec.environment import Message, Reply, Task
    from roll_environments.tool_calls import ToolCall

NUMBER = re.compile(r"-?\d[\d,]{0,400}(?:\.\d{1,40})?(?:[eE][+-]?\d{1,3})?")
TOOL = tool_schema(
    "python",
    "Evaluate an arithmetic expression in Python's syntax and return its value.",
    {"expression": "For example: (12 * 34) % 7"},
)


class MathWithPython(Environment):
    """One problem. A reply without a tool call ends the episode; its last number is the answer, with reward 1 or 0.

    An integer must be exact. Other numbers have a relative tolerance of 1e-6.

    A task with `question` and `answer` is asked instead of a problem from the seed. Expressions are evaluated by
    `arithmetic`, which runs no code.
    """

    reports_success: ClassVar[bool] = True

    def __init__(self, *, num_operations: int = 3, digits: int = 3) -> None:
        self.num_operations, self.digits = num_operations, digits

    @override
    async def reset(self, task: Task, seed: int) -> Opening:
        self.expression = ""
        if "question" in task:
            question, self.answer = str(task["question"]), _number(str(task["answer"]))
        else:
            self.expression = make_expression(random.Random(seed), self.num_operations, self.digits)
            question, self.answer = f"What is {self.expression}?", evaluate(self.expression)
        text = f"{question}\nUse the tool python. Then reply with the number."
        return Opening(messages=[{"role": "user", "content": text}], tools=[TOOL])

    @override
    async def step(self, reply: Reply) -> Turn:
        if calls := list(tool_calls(reply)):
            return tool_turn(reply, [_run(call) for call in calls], reward=0.0)
        if wrong := correction(reply, reward=0.0):
            return wrong
        numbers = NUMBER.findall(reply.text)
        text = numbers[-1] if numbers else "nan"
        if isinstance(self.answer, int):
            right = _number(text) == self.answer
        else:
            right = math.isclose(float(text.replace(",", "")), self.answer, rel_tol=1e-6)
        return Turn(reward=float(right), done=True, metrics={"success": float(right)})

    def oracle(self) -> list[Any]:
        """A reply with a call, as its arguments, then the answer."""
        return [{"expression": self.expression}, str(self.answer)]


def make_expression(generator: random.Random, num_operations: int, digits: int) -> str:
    """A random expression of whole numbers with +, -, * and %."""
    text = str(generator.randrange(10 ** (digits - 1), 10**digits))
    for _ in range(num_operations):
        operator = generator.choice("+-*%")
        text = f"({text}) {operator} {generator.randrange(10 ** (digits - 1), 10**digits)}"
    return text


def _number(text: str) -> int | float:
    text = text.replace(",", "")
    try:
        return int(text)
    except ValueError:
        return float(text)


def _run(call: ToolCall) -> tuple[Message, float]:
    """The result of a call, and 1 if it failed."""
    try:
        if call.name != "python":
            raise ToolCallError(f"there is no tool {call.name}; the tool is python")
        expression = call.arguments.get("expression")
        if not isinstance(expression, str):
            raise ToolCallError("the argument expression is missing, or no text")
        return call.result(str(evaluate(expression))), 0.0
    except (ExpressionError, ToolCallError) as error:
        return call.error(error), 1.0
