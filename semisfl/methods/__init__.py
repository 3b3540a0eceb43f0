"""The methods: a file or folder each. `semisfl.settings.catalog` has their entries. Loads no torch."""
