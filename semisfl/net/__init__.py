"""Training over a network: what both sides say, and one folder per side."""

import os

# gRPC's core writes lines of its own to stderr, one for each failed handshake. What matters of them
# is in our log. It reads this when it is first imported.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
