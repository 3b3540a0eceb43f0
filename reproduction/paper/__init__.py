"""The paper's tables and figures: the runs that each needs, and the numbers measured for them.

`exhibits` lists them. `run_index` finds the runs of a grid by their configuration. `measures` reads
numbers from runs. `written` and `drawn` show them as text and as pictures. Nothing here trains.
Heavy packages are loaded only to draw and to estimate.
"""
