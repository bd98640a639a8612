"""One RPC for the host's own processes: calls, streams of replies and the server's state on a unix
socket.

The cache worker and the engine serve with it, the gateway workers call with it. A message is a
msgspec struct in msgpack; its frame is a length and the bytes. Knows no caches, models or HTTP, and
imports nothing heavy. The established libraries of this kind (gRPC, ZeroMQ, RPyC) lack one of: typed
msgspec messages, immediate notice of the other process' end, cancellation, working without threads of
their own. Read `client.py` first.

Invariants: each call has at most one last reply; the server cancels a call whose caller has gone;
bytes that are not a message end only their own connection.
"""

from ipc.client import TRACE_ID, ReplyStream, RpcClient
from ipc.frames import CallFrame, ReplyFrame, Wire
from ipc.logs import JSON_VARIABLE, log_to_stderr
from ipc.server import IncomingCall, RpcServer

__all__ = [
    "JSON_VARIABLE", "TRACE_ID", "CallFrame", "IncomingCall", "ReplyFrame", "ReplyStream", "RpcClient", "RpcServer", "Wire",
    "log_to_stderr",
]  # fmt: skip
