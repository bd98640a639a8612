"""Everything that generates, behind one seam: `Backend.stream(request)`, an asynchronous iterator of chunks."""

from gateway.deployments.build import Facts, build_backend, describe

__all__ = ["Facts", "build_backend", "describe"]
