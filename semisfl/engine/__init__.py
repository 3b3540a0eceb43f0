"""Everything that makes training fast: the device, captured steps, flat weights, kernels."""
