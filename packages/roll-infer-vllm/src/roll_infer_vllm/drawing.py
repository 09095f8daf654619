"""State of one running output: tokens received from vLLM so far, and the weight version of each token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from roll_core.types import CompletionOutput
from roll_infer_vllm.sampling import flat_logprobs

if TYPE_CHECKING:
    from roll_core.types import FinishReason, Floats, GenerateRequest


class Drawing:
    """One output of a running request; exists during the call of `generate`."""

    def __init__(self, request: GenerateRequest, index: int, version: int) -> None:
        """Output `index` of the request, submitted with weights of `version`."""
        self.request, self.index = request, index
        self.name = f"{request.id}/{index}"
        """Request id in vLLM."""
        self.prompt_logprobs: Floats | None = None
        self.is_over = False
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._starts = [_Start(0, version)]
        self._said: Any = None
        """Last `RequestOutput` from vLLM; a delta with the tokens since the previous one."""

    def take(self, said: Any) -> None:
        """Append the tokens and logprobs of a `RequestOutput` from vLLM."""
        output = said.outputs[0]
        if self._said is None and self.request.prompt_logprobs and self.index == 0:
            self.prompt_logprobs = flat_logprobs(said.prompt_logprobs)
        self._said, self.is_over = said, said.finished
        self._tokens += output.token_ids
        self._logprobs += flat_logprobs(output.logprobs).tolist()

    def weights_changed(self, version: int) -> None:
        """Label all further tokens with `version`. Called while the engine is paused and has returned all its results.

        vLLM reports weight versions only at the end of an output, and returns tokens later than it generates them. But
        it keeps updating the metrics object of the last `RequestOutput`, which counts all generated tokens. A test
        checks that vLLM still does so.
        """
        drawn = 0 if self._said is None else self._said.metrics.num_generation_tokens
        self._starts.append(_Start(drawn, version))

    def output(self) -> CompletionOutput:
        """Completion output with the tokens so far; finish reason `abort` unless the output has ended."""
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
    """Index of the first token that is generated with weights of `version`."""

    token: int
    version: int
