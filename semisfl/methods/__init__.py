"""The methods: a file or folder each. `semisfl.catalog` has their rows. Loads no torch."""
