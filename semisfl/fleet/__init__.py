"""Where the clients live, and what a method may ask of them.

Begin with `base`: the protocol `Fleet`, the plan of a round, and the features that come back. `local` computes all
clients in this process, `cluster/` over the ranks of torchrun, `net/server` on devices; all of them compute a client
by `block` (split rounds) and `local_full` (whole models), so their losses and byte counts agree. `frozen` answers
from stored `rows`, which each client encoded once.

What leaves a client passes `outgoing` alone, which applies its policy: clip, `noise`, `codec`, quotas (`caps`).
`aggregate` combines the clients' results, `byte_counts` counts what was sent.
"""
