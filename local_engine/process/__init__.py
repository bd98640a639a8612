"""An engine in a process of its own, behind a unix socket. Imports no torch before a worker starts; read `worker` first."""
