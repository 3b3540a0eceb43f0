"""A page that shows runs as they go, or as they went. Reads run directories; changes nothing.

`follow` reads a run's files as they grow, `views` and `clients` turn them into what the page draws, `app` serves it
and `address` says where and to whom. `exporter` answers Prometheus. ``page/`` has the page itself, without a build.
"""
