#!/usr/bin/env bash
# DAPO on two nodes, as a script of overrides
set -xeuo pipefail
low=0.2
high=0.3
prompts=96
responses=12
longest=$((1024 * 6))
sp=${SP:-2}
DATA=${DATA_HOME:-"${PWD}"}/train.parquet
name=${NAME:-"dapo_$(date +%Y)_${high}"}
budget=$(((1024 + longest) * 2))
python3 -m verl.trainer.main_ppo \
    data.train_files="${DATA}" trainer.experiment_name=${name} \
    data.max_prompt_length=1024 data.max_response_length=${longest} \
    data.truncation='left' \
    data.gen_batch_size=$((prompts * 3)) data.train_batch_size=$prompts \
    algorithm.adv_estimator=grpo \
    algorithm.filter_groups.enable=True \
    algorithm.filter_groups.metric=acc \
    algorithm.filter_groups.max_num_gen_batches=5 \
    actor_rollout_ref.model.path=models/policy \
    actor_rollout_ref.actor.strategy=fsdp2 \
    actor_rollout_ref.actor.clip_ratio_low=${low} \
    actor_rollout_ref.actor.clip_ratio_high=${high} \
    actor_rollout_ref.actor.clip_ratio_c=10.0 \
    actor_rollout_ref.actor.loss_agg_mode=token-mean \
    actor_rollout_ref.actor.use_dynamic_bsz=True \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=${budget} \
    actor_rollout_ref.actor.ppo_mini_batch_size=32 \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ulysses_sequence_parallel_size=$sp \
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=$responses \
    +reward_model.reward_kwargs.overlong_buffer_cfg.enable=True \
    +reward_model.reward_kwargs.overlong_buffer_cfg.len=2048 \
    +reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor=0.5 \
    +reward_model.reward_kwargs.max_resp_len=${longest} \
    reward_model.reward_manager=dapo \
    trainer.logger='["console"]' trainer.nnodes=2 trainer.n_gpus_per_node=8 \
    trainer.total_training_steps=300 trainer.val_before_train=False "$@"
