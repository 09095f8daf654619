"""Agent `acme`: asks the policy, then asks it to check its answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from roll_core.spec.agent import Agent

if TYPE_CHECKING:
    from openai import AsyncOpenAI
    from openai.types.chat import ChatCompletionMessageParam

    from roll_core.spec.agent import Session
    from roll_core.spec.environment import Task

CHECK = "Check your answer, and repeat it or correct it."


class AcmeAgent(Agent):
    """Reward 1 if the last reply contains the `answer` of the task's row, otherwise 0."""

    def __init__(self, *, checks: int = 1) -> None:
        self.checks = checks
        self._client: AsyncOpenAI | None = None

    async def run(self, task: Task, session: Session) -> float:
        """One rollout. Raises what the client raises if the policy cannot be reached."""
        policy = self._connected(session)
        messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": task["question"]}]
        for number in range(1 + self.checks):
            completion = await policy.chat.completions.create(model=session.model, messages=messages)
            reply = completion.choices[0].message.content or ""
            if number < self.checks:
                messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": CHECK}]
        return float(str(task["answer"]) in reply)

    async def close(self) -> None:
        """Close the client's connections."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    def _connected(self, session: Session) -> AsyncOpenAI:
        """The client, with the key of this rollout. Its connections are shared."""
        from openai import AsyncOpenAI

        if self._client is None:
            self._client = AsyncOpenAI(base_url=session.base_url, api_key="of each rollout")
        return self._client.with_options(api_key=session.api_key)
