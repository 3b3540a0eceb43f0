"""Images: where they come from, who holds which, and how a round's batches are augmented.

`sources.load` finds a set by name or path; `folder`, `table` (CSV), `npz`, `hub` and `builders` (Python objects) read
one form each, `decode` turns files into uint8 pictures, `places` keeps them on disk. The result is a `dataset.Dataset`.
`partition` deals it to server and clients.

`batches` draws a round's images and augmentation at its start, as a function of (seed, round, client); `augment` and
`operations` are the paper's weak and strong views, on whole batches.
"""
