"""The paper's tables and figures as grids of runs, what was measured for them, and how it is shown.

`exhibits` lists them; `records` finds the runs of a grid again by their configuration; `measures`
reads numbers off runs; `written` and `drawn` show them. Nothing here trains, and until something is
drawn or estimated nothing heavy is loaded.
"""
