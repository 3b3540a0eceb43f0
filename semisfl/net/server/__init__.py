"""The server's side of the network.

`fleet.NetworkFleet` is what a method sees. `listener` takes connections, `admission` decides who comes in (`trust`:
by which certificate), `sessions` holds one `session` per device, and `questions` is the one place where a device is
asked and its answer checked. `split_round` and `full_round` say what is asked in a round; `waiting` decides who is
drawn while devices come and go; `roster` remembers who has which place. With a frozen bottom a method sees
`frozen.FrozenNetworkFleet`, and `uploads` asks each device for its rows.
"""
