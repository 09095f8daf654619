import json

from datasets import load_dataset
from trl import SFTConfig, SFTTrainer

if __name__ == "__main__":
    args = SFTConfig(
        output_dir="runs/sft",
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        max_length=32,
        max_steps=3,
        logging_steps=1,
        train_sampling_strategy="sequential",
        gradient_checkpointing=False,
        bf16=False,
        report_to="none",
        use_cpu=True,
    )
    rows = load_dataset("json", data_files="rows.jsonl", split="train")
    trainer = SFTTrainer(model="model", args=args, train_dataset=rows)
    trainer.train()
    with open("history.json", "w") as file:
        json.dump(trainer.state.log_history, file)
