"""Pipeline `agentic`: reinforcement learning of agents in multi-turn environments."""
