"""Verified weight sync: a train role publishes weights to an infer role; every receiver proves which it loaded.

    driver            WeightSyncController        schedules publishes, selects the transport, handles failed proofs
                        WeightPublisher           one publish between two roles
                          |  prepare_send, send_weights           |  receive_weights
    workers           WeightSender beside a train strategy ==> WeightReceiver beside an infer strategy

`roll_core.spec.transport` has the contract of transports. `transfer` has `shared`; those between processes are in the
package roll-weight-transports. `publisher` compares manifest and receipts. `roll_core.spec.weights` defines digests.
"""
