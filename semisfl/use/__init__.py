"""Using a trained model."""

# Before gRPC is imported here: it keeps gRPC from writing lines of its own to stderr.
from semisfl import net as net
