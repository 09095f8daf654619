"""A run whose reward `style` is a role with a model, and the size of the policy's layers."""

import json

MODEL = {
    "model_type": "qwen3", "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": True,
    "max_position_embeddings": 512,
}  # fmt: skip
LAYER = 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 160 + 2 * 64 + 2 * 16
"""Parameters of a layer: q and o, k and v, gate, up and down, two norms, norms of heads."""


def run_with(reward: str, folder: str) -> str:
    """A config whose reward has the model in `folder`."""
    return f"""\
pipeline: rlvr
prompt_length: 24
response_length: 40
rollout_batch_size: 16
num_return_sequences_in_group: 4
tokenizer: {{kind: byte}}
actor_train:
  model_args: {{dtype: fp32, random_init: {json.dumps(MODEL)}}}
  training_args: {{per_device_train_batch_size: 8, gradient_accumulation_steps: 1}}
  data_args: {{file_name: rows.jsonl}}
  strategy_args: {{strategy_name: hf_train}}
  device_mapping: [0]
actor_infer:
  model_args: {{dtype: fp32}}
  strategy_args: {{strategy_name: hf_infer}}
  device_mapping: [0]
rewards:
  style:
    reward: {reward}
    model_args: {{dtype: fp32, model_name_or_path: {folder}}}
    strategy_args: {{strategy_name: hf_infer}}
    device_mapping: [0]
"""
