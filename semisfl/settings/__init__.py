"""The settings of a run, and the catalog of everything they can name. Nothing here loads torch.

`config.parse` makes a checked `Config` of plain values, once. `run` has the sections that every run has, methods have
their own beside them. `catalog` names methods, models, data sets, codecs, rules and sinks, and `lookup` finds what a
name means, also ``package.module:NAME`` of another package. `policy` is what a device's owner allows.
"""
