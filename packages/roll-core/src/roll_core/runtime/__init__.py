"""What all pipelines share: placement, worker groups, weight sync, rollouts, checkpoints, guards, records."""
