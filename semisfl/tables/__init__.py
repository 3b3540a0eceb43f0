"""Models as tables: kinds of layers, the shapes they give, the models known by name, and their modules."""
