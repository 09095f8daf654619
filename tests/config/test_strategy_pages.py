"""The pages of strategies and engines list every key with its type, default, example and meaning, from the schemas.

ROLL_UPDATE_GOLDEN=1 updates the lists. Keys that only an engine validates are described by the engine.
"""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from roll_core.plugins.targets import load_target
from shared_tests.config_table import check_table

DOCS = Path(__file__).parents[2] / "docs"
BEGIN, END = "<!-- keys: made by tests/config/test_strategy_pages.py -->\n", "<!-- end of keys -->"
SCHEMAS = {
    "fsdp2": "roll_strategy_fsdp2.config:FSDP2Config",
    "megatron": "roll_strategy_megatron.config:MegatronConfig",
    "deepspeed": "roll_strategy_deepspeed.config:DeepSpeedConfig",
    "vllm": "roll_infer_vllm.config:VllmConfig",
    "sglang": "roll_infer_sglang.config:SglangConfig",
}
"""Schema by page."""
NAMES = {
    "DType": "fp32 | bf16",
    "NonNegativeFloat": "float ≥ 0",
    "Fraction": "float in (0, 1]",
    "Elements": "int > 0 | auto",
    "Auto": "auto",
}
EXAMPLES = {
    "fsdp2": {
        "fsdp_size": "8",
        "param_dtype": "bf16",
        "wrap_policy.transformer_layer_cls_to_wrap": "[Qwen3DecoderLayer]",
        "logprob_chunk_tokens": "2048",
    },
    "megatron": {
        "virtual_pipeline_model_parallel_size": "2",
        "pipeline_model_parallel_layout": "Et*3|t*4L",
        "num_layers_in_first_pipeline_stage": "11",
        "num_layers_in_last_pipeline_stage": "6",
        "expert_tensor_parallel_size": "1",
        "ddp_bucket_size": "40000000",
        "recompute_num_layers": "2",
        "logprob_chunk_tokens": "2048",
    },
    "deepspeed": {"steps_per_print": "10", "logprob_chunk_tokens": "2048"},
    "vllm": {
        "max_model_len": "8192",
        "max_num_seqs": "256",
        "max_num_batched_tokens": "8192",
        "gpu_memory_utilization": "0.8",
        "kv_cache_memory_bytes": "4294967296",
        "block_size": "16",
    },
    "sglang": {
        "tp_size": "2",
        "max_total_tokens": "65536",
        "context_length": "8192",
        "max_running_requests": "256",
        "chunked_prefill_size": "4096",
        "page_size": "64",
        "attention_backend": "fa3",
        "moe_runner_backend": "triton",
    },
}
"""Values of keys whose type and default show no form."""
COMPANIONS = {
    "pipeline_model_parallel_layout": {"pipeline_model_parallel_size": 2},
    "num_layers_in_first_pipeline_stage": {"pipeline_model_parallel_size": 2},
    "num_layers_in_last_pipeline_stage": {"pipeline_model_parallel_size": 2},
    "virtual_pipeline_model_parallel_size": {"pipeline_model_parallel_size": 2},
    "ddp_bucket_size": {"overlap_grad_reduce": True},
    "recompute_num_layers": {"recompute_granularity": "full", "recompute_method": "block"},
}
"""Keys without which a key is rejected."""


@pytest.mark.parametrize("page", SCHEMAS)
def test_the_page_has_every_key_as_the_schema_has_it(page):
    schema = load_target(SCHEMAS[page], owner="a test")
    check_table(DOCS / f"{page}.md", schema, BEGIN, END, NAMES, EXAMPLES[page])


@pytest.mark.parametrize(("page", "key"), [(page, key) for page, keys in EXAMPLES.items() for key in keys])
def test_examples_are_valid(page, key):
    schema = load_target(SCHEMAS[page], owner="a test")
    given = OmegaConf.create(COMPANIONS.get(key, {}))
    OmegaConf.update(given, key, OmegaConf.create(f"x: {EXAMPLES[page][key]}").x)
    schema.model_validate(OmegaConf.to_container(given))
