"""Rollouts: programs produce groups by requests to the replicas of an engine; groups are scored and put in batches.

    scheduler  which prompt is next, how far ahead of training; a program for each group          ──► batches
    program    what `generate` and `score` of a program do; the single-turn program               ──► scoring
    queue      requests in order; continues what a weight update or a lost replica interrupted    ──► requests
    replicas   which replica runs what, which ones are alive

Everything lives on one event loop, uses no clock but the loop's, and knows no engine: the same code runs in virtual
time on simulated engines (`roll_testing.simulation`).
"""
