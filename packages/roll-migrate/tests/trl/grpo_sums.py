import torch
from datasets import load_dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import think_format_reward

LENGTH = 2 * 128
SIZE = 4


def exact(completions, solution, **kwargs):
    return [float(text[0]["content"].strip() == right) for text, right in zip(completions, solution, strict=True)]


def make_prompt(example):
    return {"prompt": [{"role": "user", "content": example["problem"]}]}


def main():
    dataset = load_dataset("sums-lab/Sums-10K", split="train[:90%]")
    args = GRPOConfig(
        output_dir=f"runs/{LENGTH}",
        run_name="sums",
        learning_rate=2e-6,
        num_generations=SIZE,
        max_completion_length=LENGTH,
        per_device_train_batch_size=SIZE,
        gradient_accumulation_steps=2,
        steps_per_generation=4,
        num_iterations=2,
        max_steps=40,
        save_steps=20,
        logging_steps=1,
        beta=0.04,
        epsilon_high=0.28,
        loss_type="dr_grpo",
        scale_rewards=False,
        mask_truncated_completions=True,
        reward_weights=[1.0, 0.5],
        chat_template_kwargs={"enable_thinking": False},
        use_vllm=True,
        vllm_mode="colocate",
        model_init_kwargs={"dtype": torch.bfloat16},
        report_to="none",
        bf16=True,
        log_completions=True,
    )
    args.warmup_steps = 0.1
    trainer = GRPOTrainer(
        model="Qwen/Qwen3-0.6B",
        reward_funcs=[exact, think_format_reward],
        args=args,
        train_dataset=dataset,
        peft_config=LoraConfig(r=32, lora_alpha=64, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
    )
    trainer.train()


if __name__ == "__main__":
    main()
