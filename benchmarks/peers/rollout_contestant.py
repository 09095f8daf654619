"""One contestant of benchmarks/rollout.py: loads a model once, then does the work it is told to, one line each.

python rollout_contestant.py roll|transformers|vllm MODEL_DIRECTORY fp32|bf16 THREADS

Work comes as one JSON object per line on the standard input: `{"prompts": [[id, ...], ...], "lengths": [n, ...]}`,
one response of exactly so many tokens for each prompt, drawn from the softmax, with the logprob of each token. The
answer is one JSON line: seconds, CPU seconds, and the lengths of what was generated. The contestant `roll` is also
asked for the seconds that the matrix products alone of one decoding step of M rows take, by kernel
(`{"gemm_rows": M}`), that reading B bytes of memory takes (`{"read_bytes": B}`), and for where the seconds of the work
go (`"parts": true` beside the work).
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from typing import Any, TextIO


class Roll:
    """Our embedded engine, through the contract of infer strategies."""

    def __init__(self, directory: str, dtype: str, threads: int) -> None:
        from roll_core.spec.model import MeshInfo, ModelSpec
        from roll_infer_hf.config import HFInferConfig
        from roll_infer_hf.engine import HFInferStrategy

        self.loop = asyncio.new_event_loop()
        self.engine = HFInferStrategy(HFInferConfig())
        spec = ModelSpec(path=directory, dtype=dtype)
        self.loop.run_until_complete(self.engine.start(spec, MeshInfo(role="benchmark", num_threads=threads)))
        self.count = 0

    def work(self, prompts: list[list[int]], lengths: list[int]) -> list[int]:
        import numpy as np

        from roll_core.types import GenerateRequest, SamplingParams

        async def generate() -> list[int]:
            requests = [
                GenerateRequest(
                    id=f"{self.count}/{i}",
                    prompt_ids=np.array(prompt),
                    params=SamplingParams(max_new_tokens=length, ignore_eos=True),
                )
                for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
            ]
            self.count += 1
            completions = await asyncio.gather(*[self.engine.generate(each) for each in requests])
            return [len(each.outputs[0].logprobs) for each in completions]

        return self.loop.run_until_complete(generate())

    def parts(self, prompts: list[list[int]], lengths: list[int]) -> dict[str, float]:
        """Shares of the wall time of this work, by a clock around each part; the rest is Python between them."""
        from collections import defaultdict
        from unittest.mock import patch

        from roll_infer_hf.decoder import Projection

        seconds: defaultdict[str, float] = defaultdict(float)
        core: Any = self.engine._ready_core
        inside: list[str] = []

        def clocked(name: str, call: Any) -> Any:
            def timed(*given: Any, **named: Any) -> Any:
                if inside:
                    return call(*given, **named)
                inside.append(name)
                began = time.perf_counter()
                try:
                    return call(*given, **named)
                finally:
                    seconds[name] += time.perf_counter() - began
                    inside.pop()

            return timed

        parts = [(core.runner, "prefill", "prompts"), (core._batch, "sample", "sampling")]
        parts += [(Projection, "__call__", "products")]
        if kernels := getattr(core.runner, "_kernels", None):
            parts += [(kernels, "attend", "attention"), (kernels, "add_norm", "norms"), (kernels, "gate", "gates")]
        patches = [patch.object(owner, method, clocked(name, getattr(owner, method))) for owner, method, name in parts]
        for each in patches:
            each.start()
        try:
            began = time.perf_counter()
            self.work(prompts, lengths)
            whole = time.perf_counter() - began
        finally:
            for each in patches:
                each.stop()
        return {name: round(part / whole, 3) for name, part in seconds.items()}

    def gemm_seconds(self, num_rows: int) -> dict[str, tuple[float, float]]:
        """Wall and CPU seconds of one step, lower quartiles, on the model's own weights in the model's own order."""
        import statistics

        import torch

        from roll_core import openmp

        runner: Any = self.engine._ready_core.runner
        layers = [(each.qkv, each.out, each.gate_up, each.down) for each in runner._layers]
        weights = [each.weight for layer in layers for each in layer] + [runner._head.weight]
        dtype = weights[0].dtype
        inputs = {n: torch.randn(num_rows, n).to(dtype) for n in {each.shape[1] for each in weights}}
        pointwise = torch.ops.mkldnn._linear_pointwise
        with torch.no_grad():
            packed = [torch.ops.mkldnn._reorder_linear_weight(each.clone(), num_rows) for each in weights]
            kernels = {
                "linear": lambda x, weight, _: torch.nn.functional.linear(x, weight),
                "onednn": lambda x, weight, _: pointwise(x, weight, None, "none", [], ""),
                "onednn, packed": lambda x, _, weight: pointwise(x, weight, None, "none", [], ""),
            }
            found: dict[str, list[tuple[float, float]]] = {name: [] for name in kernels}
            for _ in range(15):
                for name, kernel in kernels.items():
                    wall, cpu = time.perf_counter(), time.process_time()
                    for weight, own in zip(weights, packed, strict=True):
                        kernel(inputs[weight.shape[1]], weight, own)
                    found[name].append((time.perf_counter() - wall, time.process_time() - cpu))
        # This thread's OpenMP team would make the engine's slower in the next round.
        openmp.rest()
        return {
            name: (statistics.quantiles(wall, n=4)[0], statistics.quantiles(cpu, n=4)[0])
            for name, (wall, cpu) in ((name, tuple(zip(*times, strict=True))) for name, times in found.items())
        }

    def read_seconds(self, num_bytes: int) -> dict[str, tuple[float, float]]:
        """Wall and CPU seconds of reading so much memory, at the rate of the fastest of several sums over 256 MiB."""
        import torch

        from roll_core import openmp

        numbers = torch.zeros(2**26)
        found = []
        for _ in range(7):
            wall, cpu = time.perf_counter(), time.process_time()
            numbers.sum()
            found.append((time.perf_counter() - wall, time.process_time() - cpu))
        openmp.rest()
        share = num_bytes / (numbers.numel() * numbers.element_size())
        wall, cpu = min(found)
        return {"read": (wall * share, cpu * share)}


class Transformers:
    """`generate` with its dynamic cache: one padded batch that goes on until the longest row is done."""

    def __init__(self, directory: str, dtype: str, threads: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        self.torch = torch
        kind = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=kind).eval()

    def work(self, prompts: list[list[int]], lengths: list[int]) -> list[int]:
        from transformers import LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

        torch = self.torch
        width = max(len(each) for each in prompts)
        ids = torch.tensor([[0] * (width - len(each)) + each for each in prompts])
        mask = torch.tensor([[0] * (width - len(each)) + [1] * len(each) for each in prompts])
        wanted = torch.tensor(lengths)

        class RowDone(StoppingCriteria):
            def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
                return input_ids.shape[1] - width >= wanted

        class Logprobs:
            """The logprob of a step's token is read in the next step, so that scores are not kept for all steps."""

            before: Any = None
            found: list[Any]

            def __init__(self) -> None:
                self.found = []

            def __call__(self, input_ids: Any, scores: Any) -> Any:
                if self.before is not None:
                    self.found.append(self.before.gather(1, input_ids[:, -1:]))
                self.before = torch.log_softmax(scores, dim=-1)
                return scores

        logprobs = Logprobs()
        with torch.inference_mode():
            result = self.model.generate(
                ids,
                attention_mask=mask,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=max(lengths),
                eos_token_id=None,
                pad_token_id=0,
                stopping_criteria=StoppingCriteriaList([RowDone()]),
                logits_processor=LogitsProcessorList([logprobs]),
            )
            logprobs(result, torch.zeros(len(prompts), 1))
        num = min(result.shape[1] - width, len(logprobs.found))
        return [min(num, length) for length in lengths]


class VLLM:
    """vLLM's CPU build, in this process."""

    def __init__(self, directory: str, dtype: str, threads: int) -> None:
        os.environ.update(
            VLLM_ENABLE_V1_MULTIPROCESSING="0",
            VLLM_CPU_KVCACHE_SPACE="2",
            VLLM_CPU_NUM_OF_RESERVED_CPU="0",
            VLLM_NO_USAGE_STATS="1",
            VLLM_LOGGING_LEVEL="ERROR",
            HF_HUB_OFFLINE="1",
        )
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))
        from vllm import LLM

        self.llm = LLM(
            model=directory,
            skip_tokenizer_init=True,
            dtype={"fp32": "float32", "bf16": "bfloat16"}[dtype],
            max_model_len=512,
            max_num_seqs=256,
            enforce_eager=os.environ.get("ROLL_BENCH_VLLM_EAGER") == "1",
            disable_log_stats=True,
        )

    def work(self, prompts: list[list[int]], lengths: list[int]) -> list[int]:
        from vllm import SamplingParams

        # A stale prefix cache would spare it the prefill of prompts that it has seen in an earlier round.
        self.llm.reset_prefix_cache()
        params = [
            SamplingParams(max_tokens=n, min_tokens=n, ignore_eos=True, temperature=1.0, logprobs=0, detokenize=False)
            for n in lengths
        ]
        results = self.llm.generate([{"prompt_token_ids": each} for each in prompts], params, use_tqdm=False)
        return [len(each.outputs[0].logprobs or ()) for each in results]


def main() -> None:
    """Answer until the input ends."""
    name, directory, dtype, threads = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
    answers: TextIO = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print does not belong among the answers
    contestant = {"roll": Roll, "transformers": Transformers, "vllm": VLLM}[name](directory, dtype, threads)
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        task = json.loads(line)
        if "gemm_rows" in task:
            answer: dict[str, Any] = contestant.gemm_seconds(task["gemm_rows"])  # type: ignore[union-attr]
        elif "read_bytes" in task:
            answer = contestant.read_seconds(task["read_bytes"])  # type: ignore[union-attr]
        elif task.get("parts"):
            answer = contestant.parts(task["prompts"], task["lengths"])  # type: ignore[union-attr]
        else:
            wall, cpu = time.perf_counter(), time.process_time()
            lengths = contestant.work(task["prompts"], task["lengths"])
            answer = {
                "seconds": time.perf_counter() - wall,
                "cpu_seconds": time.process_time() - cpu,
                "lengths": lengths,
            }
        print(json.dumps(answer), file=answers, flush=True)
    os._exit(0)  # engines take long to shut down, and there is nothing to save


if __name__ == "__main__":
    main()
