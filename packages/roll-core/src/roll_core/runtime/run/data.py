"""The data of a run. Each `data_args` is read once and cached for all roles."""

from __future__ import annotations

from typing import TYPE_CHECKING

from roll_core.data.encode import encode_prompts, encode_sft
from roll_core.data.rows import read_rows

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Literal

    from transformers import PreTrainedTokenizerBase

    from roll_core.data.rows import Rows
    from roll_core.spec.config import DataArguments, RunConfig
    from roll_core.spec.rollout import Prompt
    from roll_core.types import TrainSequence


class RunData:
    """Cache of dataset rows, keyed by their `data_args`."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._read: dict[str, Rows] = {}

    def rows(self, data: DataArguments) -> Rows:
        """The rows of `data`, read on first use."""
        key = data.model_dump_json()
        if key not in self._read:
            self._read[key] = read_rows(data)
        return self._read[key]

    def prompts(self, data: DataArguments, tokenizer: PreTrainedTokenizerBase) -> Sequence[Prompt]:
        """Encode rows as prompts of at most `prompt_length` tokens."""
        prompts, _ = encode_prompts(self.rows(data), data, tokenizer, prompt_length=self._config.prompt_length)
        return prompts

    def sequences(
        self,
        data: DataArguments,
        tokenizer: PreTrainedTokenizerBase,
        *,
        overlong: Literal["drop", "truncate"],
        on_prompt: bool,
        require_response: bool,
    ) -> Sequence[TrainSequence]:
        """Encode rows with prompt and response as training sequences. See `encode_sft` for the arguments."""
        sequences, _ = encode_sft(
            self.rows(data),
            data,
            tokenizer,
            prompt_length=self._config.prompt_length,
            response_length=self._config.response_length,
            overlong=overlong,
            on_prompt=on_prompt,
            require_response=require_response,
        )
        return sequences
