from datasets import load_dataset
from transformers import AutoModelForCausalLM
from trl import DPOConfig, DPOTrainer

model = AutoModelForCausalLM.from_pretrained("models/policy", dtype="float32", attn_implementation="sdpa")
data = load_dataset("json", data_files={"train": "pairs.jsonl", "test": "held_out.jsonl"})
config = DPOConfig(
    "runs/dpo",
    beta=0.3,
    loss_type=["sigmoid", "sft"],
    loss_weights=[1.0, 0.2],
    max_length=96,
    num_train_epochs=2,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=4,
    eval_strategy="steps",
    eval_steps=25,
    bf16=False,
    report_to=["tensorboard"],
)
trainer = DPOTrainer(model, None, config, train_dataset=data["train"], eval_dataset=data["test"])
trainer.train()
