"""An infer strategy as a run has it: constructed from its record, called on one event loop, with a deadline on all."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from roll_core.plugins.requirements import check_requirements
from roll_core.plugins.targets import load_target, schema_of
from roll_core.spec.config import StrategyConfig
from roll_core.spec.model import MeshInfo
from roll_core.spec.weights import tensor_entry
from roll_core.types import GenerateRequest, SamplingParams, WeightManifest
from roll_testing.infer.interrupting import settle

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

    from torch import Tensor

    from roll_core.spec.infer import InferStrategy
    from roll_core.spec.model import ModelSpec
    from roll_core.spec.providers import InferProvider
    from roll_core.types import Completion, TokenIds, WeightReceipt

T = TypeVar("T")

ROLE = "actor_infer"
"""Of the strategy under test, in its own error messages."""
_numbers = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What is started."""

    provider: InferProvider
    strategy_config: Mapping[str, Any]
    model: ModelSpec
    device: str = "cpu"
    backend: str = "gloo"
    timeout_s: float = 120.0

    def with_(self, **changes: Any) -> Setup:
        """The same with some fields changed."""
        return replace(self, **changes)


def ask(
    prompt: Sequence[int] | TokenIds, *, n: int = 1, prompt_logprobs: bool = False, **params: Any
) -> GenerateRequest:
    """A request with an id of its own; it goes on to 16 tokens, whatever is drawn, unless `params` say otherwise."""
    return GenerateRequest(
        id=f"request-{next(_numbers)}",
        prompt_ids=np.asarray(prompt, dtype=np.int64),
        params=SamplingParams(**{"ignore_eos": True, "max_new_tokens": 16, **params}),
        n=n,
        prompt_logprobs=prompt_logprobs,
    )


class Engine:
    """The strategy on an event loop that is its own; the loop turns while a call is waited for."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        owner = f"infer strategy {setup.provider.name}"
        check_requirements(setup.provider, owner=owner)
        config = schema_of(setup.provider, StrategyConfig, owner=owner).model_validate(dict(setup.strategy_config))
        self._runner = asyncio.Runner()
        strategy_class = load_target(setup.provider.target, owner=owner)
        self.strategy: InferStrategy = self.run(lambda: _construct(strategy_class, config))
        self.version = 0
        """Of the last publish."""
        self.pristine = True
        """Whether it has the weights with which it was started."""

    def run(self, act: Callable[[], Awaitable[T]], timeout_s: float | None = None) -> T:
        """What `act()` returns. Fails if it does not within the deadline of the tests."""
        deadline = self.setup.timeout_s if timeout_s is None else timeout_s

        async def limited() -> T:
            return await asyncio.wait_for(act(), deadline)

        try:
            return self._runner.get_loop().run_until_complete(limited())
        except TimeoutError as error:
            if error.args:  # the strategy's own
                raise
            raise AssertionError(f"no answer within {deadline:g} s") from error

    def start(self) -> None:
        """With the setup's model."""
        mesh = MeshInfo(
            role=ROLE,
            device=self.setup.device,
            backend=self.setup.backend,
            num_threads=1,
            timeout_s=self.setup.timeout_s,
        )
        self.run(lambda: self.strategy.start(self.setup.model, mesh))
        settle()

    def generate(self, *requests: GenerateRequest) -> list[Completion]:
        """The answers, in order; all requests enter in one turn of the event loop."""
        return list(self.run(lambda: together(self.strategy, requests)))

    def publish(
        self,
        weights: Mapping[str, Tensor],
        *,
        sent: Iterable[tuple[str, Tensor]] | None = None,
        shared: bool = False,
        digests: bool = True,
    ) -> WeightReceipt:
        """The next version. `sent`, if given, is what is sent under the manifest of `weights`, which may lack its
        digests."""
        self.version += 1
        self.pristine = False
        entries = tuple(tensor_entry(name, each, None if digests else "") for name, each in weights.items())
        manifest = WeightManifest(version=self.version, tensors=entries)
        tensors = weights.items() if sent is None else sent
        return self.run(lambda: self.strategy.update_weights(self.version, manifest, iter(tensors), shared=shared))

    def close(self) -> None:
        """Stop it, and end its event loop."""
        try:
            self.run(self.strategy.stop)
        finally:
            self._runner.close()


async def together(strategy: InferStrategy, requests: Sequence[GenerateRequest]) -> list[Completion]:
    """All at once. The first error is raised once all have ended."""
    found = await asyncio.gather(*[strategy.generate(each) for each in requests], return_exceptions=True)
    for each in found:
        if isinstance(each, BaseException):
            raise each
    return [each for each in found if not isinstance(each, BaseException)]


async def _construct(strategy_class: Callable[[Any], InferStrategy], config: Any) -> InferStrategy:
    return strategy_class(config)
