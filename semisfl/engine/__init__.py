"""How it is made fast: the device, captured steps, flat weights, kernels."""
