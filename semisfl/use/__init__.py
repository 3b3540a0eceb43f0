"""Use a trained model: classify, evaluate, export, and split inference between devices and a server."""

# Before gRPC is imported here: it keeps gRPC from writing lines of its own to stderr.
from semisfl import net as net
