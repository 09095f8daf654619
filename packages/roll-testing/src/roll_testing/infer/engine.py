"""Runs an infer strategy as a run does: built from its record, on one event loop, with a timeout on every call."""

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
from roll_core.spec.weights import make_manifest
from roll_core.types import GenerateRequest, SamplingParams
from roll_testing.infer.interrupting import settle

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence

    from torch import Tensor

    from roll_core.spec.infer import InferStrategy
    from roll_core.spec.model import ModelSpec
    from roll_core.spec.providers import InferProvider
    from roll_core.types import Completion, TokenIds, WeightReceipt

T = TypeVar("T")

ROLE = "actor_infer"
"""Role of the strategy under test, shown in its error messages."""
_numbers = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Strategy, configuration and model of an engine."""

    provider: InferProvider
    strategy_config: Mapping[str, Any]
    model: ModelSpec
    device: str = "cpu"
    backend: str = "gloo"
    timeout_s: float = 120.0

    def with_(self, **changes: Any) -> Setup:
        """Return a copy with some fields changed."""
        return replace(self, **changes)


def ask(
    prompt: Sequence[int] | TokenIds,
    *,
    n: int = 1,
    prompt_logprobs: bool = False,
    prompt_topk: int = 0,
    **params: Any,
) -> GenerateRequest:
    """Return a request with a unique id. By default it generates 16 tokens and ignores end tokens."""
    return GenerateRequest(
        id=f"request-{next(_numbers)}",
        prompt_ids=np.asarray(prompt, dtype=np.int64),
        params=SamplingParams(**{"ignore_eos": True, "max_new_tokens": 16, **params}),
        n=n,
        prompt_logprobs=prompt_logprobs,
        prompt_topk=prompt_topk,
    )


class Engine:
    """The strategy on its own event loop, which runs only during a call."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        owner = f"infer strategy {setup.provider.name}"
        check_requirements(setup.provider, owner=owner)
        config = schema_of(setup.provider, StrategyConfig, owner=owner).model_validate(dict(setup.strategy_config))
        self._runner = asyncio.Runner()
        strategy_class = load_target(setup.provider.target, owner=owner)
        self.strategy: InferStrategy = self.run(lambda: _construct(strategy_class, config))
        self.version = 0
        """Version of the last publish."""
        self.pristine = True
        """True if the engine has the weights with which it was started."""

    def run(self, act: Callable[[], Awaitable[T]], timeout_s: float | None = None) -> T:
        """Run `act()` and return its result. Fails if it exceeds `timeout_s` (default: the time limit of the tests)."""
        deadline = self.setup.timeout_s if timeout_s is None else timeout_s

        async def limited() -> T:
            return await asyncio.wait_for(act(), deadline)

        try:
            return self._runner.get_loop().run_until_complete(limited())
        except TimeoutError as error:
            if error.args:  # raised by the strategy itself
                raise
            raise AssertionError(f"the engine did not return within {deadline:g} s") from error

    def start(self) -> None:
        """Start the engine with the setup's model."""
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
        """Return the completions, in order. All requests are submitted in one iteration of the event loop."""
        return list(self.run(lambda: together(self.strategy, requests)))

    def publish(
        self,
        weights: Mapping[str, Tensor],
        *,
        sent: Iterable[tuple[str, Tensor]] | None = None,
        shared: bool = False,
        digests: bool = True,
        like: str = "",
        unsent: Collection[str] = (),
    ) -> WeightReceipt:
        """Publish `weights` as the next version and return the receipt.

        If `sent` is given, these tensors are sent under the manifest of `weights`. With `digests=False`, the manifest
        has no digests. `like` is the function of the digests, see `roll_core.spec.weights`. Tensors named in `unsent`
        are not sent.
        """
        self.version += 1
        self.pristine = False
        manifest = make_manifest(self.version, weights.items(), like)
        if not digests:
            manifest = replace(manifest, tensors=tuple(replace(tensor, digest=like) for tensor in manifest.tensors))
        manifest = replace(
            manifest,
            tensors=tuple(entry for entry in manifest.tensors if entry.name not in unsent),
            unsent=tuple(entry for entry in manifest.tensors if entry.name in unsent),
        )
        tensors = [(name, weights[name]) for name in weights if name not in unsent] if sent is None else sent
        return self.run(lambda: self.strategy.update_weights(self.version, manifest, iter(tensors), shared=shared))

    def close(self) -> None:
        """Stop the engine and close its event loop."""
        try:
            self.run(self.strategy.stop)
        finally:
            self._runner.close()


async def together(strategy: InferStrategy, requests: Sequence[GenerateRequest]) -> list[Completion]:
    """Submit all requests at once. Raises the first error, after all requests have ended."""
    results = await asyncio.gather(*[strategy.generate(request) for request in requests], return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]


async def _construct(strategy_class: Callable[[Any], InferStrategy], config: Any) -> InferStrategy:
    return strategy_class(config)
