"""An engine in a process of its own, behind a unix socket: the worker, and a client of it.

Imports no torch before the worker's thread loads the engine. Read `worker` first.
"""
