"""A run: how it starts, goes on, is kept and is read.

`start` is the one way to begin a run and the one way to continue it; `experiment` puts data, model, clients and
method together, `loop` runs the rounds, `directory` and `checkpoint` keep them, `sinks` and callbacks are told.
`compare` trains a grid of runs; `reading` and `report` read what is there, without torch, and `plots` draws it.
"""
