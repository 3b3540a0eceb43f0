"""The command line."""

import os

# On a busy machine threads that spin while they wait for each other make rounds many times slower.
# It must be set before torch is imported; what the user has set stays.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
