#!/usr/bin/env bash
# A mixture of experts with Megatron and an engine with expert parallelism, in arrays.
NODES=${NODES:-2}
TP=2
EP=4
ACTOR=(
    actor_rollout_ref.actor.optim.lr=2e-6
    actor_rollout_ref.actor.ppo_mini_batch_size=32
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=${TP}
    actor_rollout_ref.actor.megatron.expert_model_parallel_size=${EP}
    actor_rollout_ref.actor.megatron.expert_tensor_parallel_size=1
    +actor_rollout_ref.actor.megatron.override_transformer_config.moe_router_dtype=fp32
    +actor_rollout_ref.actor.megatron.override_transformer_config.moe_permute_fusion=True
    +actor_rollout_ref.actor.megatron.override_transformer_config.moe_enable_deepep=True
    +actor_rollout_ref.actor.optim.override_optimizer_config.optimizer_cpu_offload=True
    +actor_rollout_ref.actor.optim.override_optimizer_config.optimizer_offload_fraction=0.5
    +actor_rollout_ref.actor.optim.override_optimizer_config.use_precision_aware_optimizer=True
    actor_rollout_ref.actor.use_kl_loss=True
)
ROLLOUT=(
    actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.n=4
    actor_rollout_ref.rollout.tensor_model_parallel_size=2
    actor_rollout_ref.rollout.data_parallel_size=4
    actor_rollout_ref.rollout.expert_parallel_size=8
)
python3 -m verl.trainer.main_ppo \
    model_engine=megatron \
    algorithm.adv_estimator=grpo \
    data.train_files=rows.jsonl \
    data.train_batch_size=64 \
    actor_rollout_ref.model.path=models/mixture \
    trainer.nnodes=${NODES} \
    trainer.total_training_steps=10 \
    "${ACTOR[@]}" \
    "${ROLLOUT[@]}"
