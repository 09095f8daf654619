"""State of one running output: tokens received from vLLM so far, and the weight version of each token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from roll_core.types import CompletionOutput
from roll_infer_vllm.sampling import flat_logprobs, top_tokens
from roll_infer_vllm.versions import weight_spans

if TYPE_CHECKING:
    from roll_core.types import FinishReason, Floats, GenerateRequest, RoutedExperts, TopTokens
    from roll_modeling.routing import RoutingLayout


class VllmOutput:
    """One output of a running request; exists during the call of `generate`."""

    def __init__(self, request: GenerateRequest, index: int, version: int, layout: RoutingLayout | None = None) -> None:
        """Output `index` of the request, submitted with weights of `version`.

        `layout`: expert layout of the model, if the engine returns routed experts.
        """
        self.request, self.index, self._layout = request, index, layout
        self.name = f"{request.id}/{index}"
        """Request id in vLLM."""
        self.prompt_logprobs: Floats | None = None
        self.prompt_topk: TopTokens | None = None
        self.finished = False
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._starts = [(0, version)]
        """Pairs of a weight version and the first token generated with it, as `(token, version)`."""
        self._last: Any = None
        """Last `RequestOutput` from vLLM; a delta with the tokens since the previous one."""

    def append(self, delta: Any) -> None:
        """Append the tokens and logprobs of a `RequestOutput` from vLLM."""
        output = delta.outputs[0]
        first = self._last is None and output.token_ids  # without a token, an abort came amid the prompt
        if first and self.request.prompt_logprobs and self.index == 0:
            self.prompt_logprobs = flat_logprobs(delta.prompt_logprobs)
            if self.request.prompt_topk:
                self.prompt_topk = top_tokens(delta.prompt_logprobs, self.request.prompt_topk)
        self._last, self.finished = delta, delta.finished
        self._tokens += output.token_ids
        self._logprobs += flat_logprobs(output.logprobs).tolist()

    def weights_changed(self, version: int) -> None:
        """Label all further tokens with `version`. Called while the engine is paused and has returned all its results.

        vLLM reports weight versions only at the end of an output, and returns tokens later than it generates them. But
        it keeps updating the metrics object of the last `RequestOutput`, which counts all generated tokens. A test
        checks that vLLM still does so.
        """
        num_generated = 0 if self._last is None else self._last.metrics.num_generation_tokens
        self._starts.append((num_generated, version))

    def completion(self) -> CompletionOutput:
        """Completion output with the tokens so far; finish reason `abort` unless the output has ended."""
        num = min(len(self._tokens), self.request.params.max_new_tokens)
        ended = self._last.outputs[0] if self.finished else None
        versions = np.zeros(num, np.int32)
        for start, version in self._starts:
            versions[start:] = version
        for span in weight_spans(ended):
            versions[span.start : span.end] = int(span.version)
        reason: FinishReason = ended.finish_reason if ended else "abort"
        return CompletionOutput(
            token_ids=np.asarray(self._tokens[:num], np.int64),
            logprobs=np.asarray(self._logprobs[:num], np.float32),
            versions=versions,
            finish_reason=reason,
            stop=ended.stop_reason if ended and reason == "stop" else None,
            routed_experts=self._routed_experts(ended, num),
        )

    def _routed_experts(self, ended: Any, num: int) -> RoutedExperts | None:
        """Rows `[P + num - 1, M, K]` of an output that has ended; None if the request did not ask for them.

        vLLM returns them only at the end, also of an aborted output. After a weight update it recomputes the KV cache
        of running requests, but keeps their rows: the experts with which the next tokens were sampled.
        """
        rows = ended.routed_experts if ended is not None else None
        if self._layout is None or rows is None or not self.request.routed_experts:
            return None
        return self._layout.routed_experts(rows[: len(self.request.prompt_ids) + num - 1])
