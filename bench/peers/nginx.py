"""nginx as a plain reverse proxy, and as a cache of POST bodies: what a proxy in C costs, a ceiling and no gateway.

It reads no JSON, knows no caller and counts nothing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from bench.lab.native import Stub
from bench.lab.processes import BenchError, Child, answers
from bench.lab.systems import Running, Setup, Target, clean_environment, free_port

_CONFIG = """
{user}daemon off;
pid {folder}/nginx.pid;
error_log {folder}/error.log;
worker_processes 1;
events {{ worker_connections 4096; }}
http {{
  access_log off;
  client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi;
  scgi_temp_path {folder}/scgi;
  proxy_cache_path {folder}/cache keys_zone=answers:16m;
  client_body_buffer_size 256k;
  client_max_body_size 16m;
  keepalive_requests 100000000;
  tcp_nodelay on;
  upstream stub {{ server 127.0.0.1:{stub_port}; keepalive 512; keepalive_requests 100000000; }}
  server {{
    listen 127.0.0.1:{port};
    proxy_http_version 1.1;
    proxy_set_header connection "";
    location = /healthz {{ return 200; }}
    location /cached/ {{
      proxy_cache answers;
      proxy_cache_methods POST;
      proxy_cache_key $request_body;
      proxy_cache_valid 200 1h;
      proxy_pass http://stub/;
    }}
    location / {{ proxy_buffering off; proxy_pass http://stub; }}
  }}
}}
"""


class Nginx:
    """The nginx on PATH."""

    name = "nginx"

    def install(self) -> None:
        if shutil.which("nginx") is None:
            raise BenchError("no nginx on PATH (Debian: apt-get install nginx-light)")

    def lacks(self, setup: Setup) -> str | None:
        return None if setup in (Setup.MISS, Setup.HIT_MEMORY) else "a ceiling for one worker and for answers in memory"

    def configuration(self, setup: Setup) -> str:
        return setup.value

    def start(self, setup: Setup, stub: Stub, folder: Path) -> Running:
        port = free_port()
        config = folder / "nginx.conf"
        user = "user root;\n" if os.geteuid() == 0 else ""  # its cache lies in a folder that only this user may enter
        config.write_text(_CONFIG.format(folder=folder, port=port, stub_port=stub.port, user=user))
        binary = shutil.which("nginx") or "nginx"
        command = [binary, "-c", str(config), "-e", str(folder / "error.log")]
        child = Child(command, folder / "nginx.log", clean_environment(), folder)
        try:
            child.wait_until(lambda: answers(f"http://127.0.0.1:{port}/healthz"), 10.0)
        except BaseException:
            child.stop()
            raise
        said = subprocess.run([binary, "-v"], capture_output=True, text=True, check=False).stderr
        return Running(
            port=port,
            roots=(child.pid,),
            stop=child.stop,
            version=said.strip().rpartition("/")[2],
            instant=Target(
                "stub", "/cached/v1/chat/completions" if setup is Setup.HIT_MEMORY else "/v1/chat/completions"
            ),
            paced=Target("stub", "/pace/10/v1/chat/completions"),
        )
