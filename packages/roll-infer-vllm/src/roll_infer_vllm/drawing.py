"""One output of a request on its way: what vLLM has said of it so far, and which weights drew which of its tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from roll_core.types import CompletionOutput
from roll_infer_vllm.sampling import flat_logprobs

if TYPE_CHECKING:
    from roll_core.types import FinishReason, Floats, GenerateRequest


class Drawing:
    """Lives as long as the call of `generate`."""

    def __init__(self, request: GenerateRequest, index: int, version: int) -> None:
        """It enters under weights of `version`."""
        self.request, self.index = request, index
        self.name = f"{request.id}/{index}"
        """Under which vLLM knows it."""
        self.prompt_logprobs: Floats | None = None
        self.is_over = False
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._starts = [_Start(0, version)]
        self._said: Any = None
        """vLLM's last `RequestOutput`: of what was drawn since the one before."""

    def take(self, said: Any) -> None:
        """Add what vLLM says."""
        output = said.outputs[0]
        if self._said is None and self.request.prompt_logprobs and self.index == 0:
            self.prompt_logprobs = flat_logprobs(said.prompt_logprobs)
        self._said, self.is_over = said, said.finished
        self._tokens += output.token_ids
        self._logprobs += flat_logprobs(output.logprobs).tolist()

    def weights_changed(self, version: int) -> None:
        """What comes is of `version`. Called while the engine is paused and has told of all that it had drawn.

        vLLM names weights only once an output has ended, and until then says some tokens later than it draws them. But
        it goes on counting in the metrics that it has handed out (a test asks whether it still does).
        """
        drawn = 0 if self._said is None else self._said.metrics.num_generation_tokens
        self._starts.append(_Start(drawn, version))

    def output(self) -> CompletionOutput:
        """As far as it is drawn; cut short unless it has ended."""
        num = min(len(self._tokens), self.request.params.max_new_tokens)
        ended = self._said.outputs[0] if self.is_over else None
        versions = np.zeros(num, np.int32)
        for start in self._starts:
            versions[start.token :] = start.version
        for span in (ended.weight_versions if ended else None) or ():
            versions[span.start : span.end] = int(span.version)
        reason: FinishReason = ended.finish_reason if ended else "abort"
        return CompletionOutput(
            token_ids=np.asarray(self._tokens[:num], np.int64),
            logprobs=np.asarray(self._logprobs[:num], np.float32),
            versions=versions,
            finish_reason=reason,
            stop=ended.stop_reason if ended and reason == "stop" else None,
        )


@dataclass(frozen=True, slots=True)
class _Start:
    """From this token on, in the order of tokens, weights of this version draw."""

    token: int
    version: int
