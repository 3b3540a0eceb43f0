"""A client's side of the network.

`join` is the command's work: it reads the images and the owner's policy, then `connection` connects and reconnects
until the run ends. `device` answers the server's questions; `agreement` holds each of them to the terms that the
owner accepted, `owner` and `allowance` to the policy and its quotas, which are kept on disk. `split_round` and
`full_round` compute with `member`, a block of one client. With a frozen bottom `upload` sends the rows of all images.
"""
