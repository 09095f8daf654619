import json

from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer
from trl_digit_reward import digits

if __name__ == "__main__":
    args = GRPOConfig(
        output_dir="runs/grpo",
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        num_generations=4,
        max_completion_length=6,
        learning_rate=1e-2,
        beta=0.1,
        max_steps=3,
        logging_steps=1,
        gradient_checkpointing=False,
        bf16=False,
        report_to="none",
        use_cpu=True,
    )
    rows = load_dataset("json", data_files="rows.jsonl", split="train")
    trainer = GRPOTrainer(model="model", reward_funcs=digits, args=args, train_dataset=rows)
    trainer.train()
    with open("history.json", "w") as file:
        json.dump(trainer.state.log_history, file)
