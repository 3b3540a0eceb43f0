"""Everything that makes training fast: the device, captured steps, flat weights, kernels.

`hardware.Hardware` is the only door: methods and fleets get optimisers, meters and steps from it, and do not know
whether a step is captured (`graphs`), which passes run side by side (`streams`), or that all weights of a model lie
in one tensor (`weights`) that `sgd` steps in one pass. `kernels/` has each fused operation twice, as plain PyTorch
and in Triton.
"""
