"""HTTP in, SSE out: the `/v1` endpoints and the shapes on their wires."""
