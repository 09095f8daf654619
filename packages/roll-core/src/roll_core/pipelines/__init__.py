"""Built-in pipelines: supervised fine-tuning and reinforcement learning from verifiable rewards."""
