"""Rollouts: prompts are answered by the replicas of an engine, judged, and put together as batches.

    prompts ──► RolloutScheduler ──► Dispatcher ──► Replica (an engine's worker, or a simulated one)
                lines of groups      requests       draws tokens
                in prompt order      and drafts
    batch  ◄── judge, filter   ◄── completions ◄──

The dispatcher knows requests, and how they go on when weights change under way; its fleet knows replicas: routing, the
bound on what runs, deaths. The scheduler knows groups and batches: which prompt is next, what is left out, how far
ahead of training generation may go. All live on one event loop, touch no clock but the loop's, and know no engine: the
same code runs in virtual time on simulated engines (`roll_core.testing.simulation`).
"""
