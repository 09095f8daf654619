torchrun --nproc_per_node=2 -m openrlhf.cli.train_rm \
   --pretrain models/base --save_path out \
   --dataset data/pairs.jsonl --prompt_key question --chosen_key good --rejected_key bad \
   --margin_loss --train_batch_size 32 --max_len 1024 --loss sigmoid --compute_fp32_loss \
   --learning_rate 3e-6 --lora_rank 8 --lora_alpha 32
