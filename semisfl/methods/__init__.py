"""The methods: a file or folder each. `semisfl.settings.catalog` has their rows. Loads no torch."""
