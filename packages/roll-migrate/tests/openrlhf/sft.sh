set -x

read -r -d '' training_commands <<EOF
openrlhf.cli.train_sft \
   --max_len 4096 \
   --dataset data/chats.jsonl \
   --input_key messages \
   --multiturn \
   --apply_chat_template \
   --train_batch_size 64 \
   --micro_train_batch_size 2 \
   --max_samples 500000 \
   --pretrain models/base \
   --save_path ./out \
   --save_steps -1 \
   --logging_steps 5 \
   --eval_steps -1 \
   --zero_stage 1 \
   --max_epochs 3 \
   --bf16 \
   --learning_rate 2e-5 \
   --lr_scheduler linear \
   --load_checkpoint \
   --packing_samples \
   --gradient_checkpointing
EOF

if [[ ${1} != "slurm" ]]; then
    deepspeed --num_gpus 4 --module $training_commands
fi
