"""Verified weight sync: a train role publishes weights to an infer role; every receiver proves which it loaded.

    driver            WeightSyncController        schedules publishes, selects the transport, handles failed proofs
                        WeightBroadcaster           one publish between two roles
                          |  prepare_send, send_weights           |  receive_weights
    workers           WeightSender beside a train strategy ==> WeightReceiver beside an infer strategy

The transports (`roll_core.spec.transport` has their contract) are in `transports`; `proof` compares manifest and
receipts; digests are defined in `roll_core.spec.weights`.
"""
