"""Rewards for ROLL: code in a sandbox, rules, judges, HTTP services and combinations of them."""
