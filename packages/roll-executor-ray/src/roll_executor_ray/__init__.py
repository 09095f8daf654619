"""ROLL's executor on Ray: every worker in its own process, on one machine or many."""
