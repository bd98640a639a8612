"""What Sameway is measured beside: one file each, and the names they go by on the command line."""

from __future__ import annotations

from collections.abc import Mapping

from bench.lab.systems import System
from bench.peers.litellm import LiteLLM
from bench.peers.nginx import Nginx
from bench.peers.portkey import Portkey
from bench.peers.tensorzero import TensorZero

PEERS: Mapping[str, System] = {peer.name: peer for peer in (LiteLLM(), TensorZero(), Portkey(), Nginx())}
