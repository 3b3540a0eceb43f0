"""Models as tables of layers, cut in two.

A model is a list of layers (`settings.layer_kinds`). `shapes` computes what each layer is given and gives, `modules`
makes PyTorch modules of a table and back, `layers` has the modules that PyTorch lacks, `split` cuts, `build` does all
of it for a configuration. `zoo` and `backbones` are the models known by name, `weight_files` and `exported` bring
trained weights, `own` takes modules that users wrote.

`stack` computes several clients' copies of a bottom at once, `freezing` makes a bottom that never changes.
"""
