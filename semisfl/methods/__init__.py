"""The methods: a file or folder each. `semisfl.settings.catalog` has their entries. Loads no torch.

Begin with `semisfl`, which follows Algorithm 1 line by line. A method is a class with ``round``, ``tested`` and its
state (`base.Method`); everything it may use comes in a `base.Setup`. Split methods ask the fleet for features and
return gradients; whole-model methods (`full_model`) hand their client half to ``fleet.train``.

Beside a method lie its settings and the cost of its round (`sizes`), which `semisfl plan` reads. `statistics` counts
pseudo-labels for the metrics of all methods, `influence` limits what one client can do to a step.
"""
