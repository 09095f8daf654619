"""Other trainers' configs, rewritten into ours: what became of each key, and why."""
