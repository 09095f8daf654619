"""Rollouts: programs send requests to an engine's replicas and return groups, which are scored and batched.

    scheduler  prompt order and lead over training; runs one program per group                    ──► batches
    program    `generate` and `score` calls of programs; the single-turn program                  ──► scoring
    queue      request order; continues requests after a weight update or a lost replica          ──► requests
    replicas   routing of requests and health checks of replicas

All code runs on one event loop, uses only the loop's clock, and does not depend on an engine. The same code runs in
virtual time on simulated engines (`tests/shared`).
"""
