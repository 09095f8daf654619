#!/bin/bash
export DATA=pairs-lab/Labels
MODEL=${MODEL:-Qwen/Qwen3-0.6B}
accelerate launch --num_processes 2 trl/scripts/kto.py \
    --model_name_or_path $MODEL \
    --dataset_name $DATA \
    --learning_rate 5e-7 \
    --desirable_weight 1.5 \
    --per_device_train_batch_size 4 \
    --gradient_accumulation_steps 2 \
    --precompute_ref_log_probs \
    --max_steps 100 \
    --output_dir runs/kto
