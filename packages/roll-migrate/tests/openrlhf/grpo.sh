ARGS=(
   --actor.num_gpus_per_node 8
   --vllm.num_engines 8
   --train.colocate_all
   --actor.model_name_or_path models/policy
   --reward.remote_url /code/my_rewards.py
   --data.prompt_dataset "data/a.parquet, data/b.parquet"
   --data.input_key prompt  # chats
   --data.label_key solution
   --data.apply_chat_template
)
BATCH=(--rollout.batch_size 32 --rollout.n_samples_per_prompt 8)
python3 -m openrlhf.cli.train_ppo_ray "${ARGS[@]}" "${BATCH[@]}" \
   --algo.advantage.estimator group_norm \
   --algo.kl.init_coef 0 \
   --actor.loss_agg_mode seq-mean-token-mean \
   --actor.dual_clip 3 \
   --train.batch_size 64 \
   --train.dynamic_batch_enable \
   --train.max_tokens_per_gpu 8192 \
   --rollout.max_tokens_per_gpu 16384 \
   --rollout.max_new_tokens 3072 \
   --data.max_len 4096 \
   --ds.ring_attn_size 2 \
   --eval.dataset data/test.jsonl \
   --eval.steps 10 \
   --eval.n_samples_per_prompt 2 \
   --ckpt.load_enable
