"""OpenAI's shapes: requests, chunks, errors, server-sent events; streams folded into whole answers.

Must not import any other room: no sockets, no services, no settings. From the leaves it imports
only the values `policies.Demand` and `policies.Usage`. Read `types.py` first, then `chunks.py` and
`fold.py`.
"""
