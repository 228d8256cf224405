"""A role in the eyes of a stack: binds its port, says that it is ready, ends on SIGTERM; or misbehaves as told.

python fake_role.py ROLE CONFIG BEHAVIOUR
"""

import json
import signal
import socket
import sys
import time
from pathlib import Path

from k3svc.config import load_config

role, config_path, behaviour = sys.argv[1:]
config = load_config(Path(config_path)).server
sys.stderr.write(f"{role} starts as {behaviour}\n")
if behaviour == "crash":
    sys.stderr.write("error: no such checkpoint\n")
    sys.exit(3)
if behaviour == "mute":
    signal.pause()
server = socket.socket()
server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
server.bind((config.host, config.port))
server.listen()
sys.stdout.write("not a ready line\n")
if behaviour == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
else:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
address = f"{config.host}:{config.port}"
json.dump({"event": "ready", "role": role, "address": address, "device": "fake", "start_s": 0.5}, sys.stdout)
sys.stdout.write("\n")
sys.stdout.flush()
if behaviour == "die":
    server.accept()
    sys.stderr.write("error: out of memory\n")
    sys.exit(4)
if behaviour == "stubborn":
    signal.pause()
signal.sigwait({signal.SIGTERM})
if behaviour == "holding":
    signal.sigwait({signal.SIGINT})
sys.stdout.write(f"drained at {time.monotonic()}\n")
