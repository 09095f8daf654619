"""An MCP server of a user: a lock with a number. `python server_mcp.py stdio|http [PORT]`."""

import io
import os
import subprocess
import sys
from pathlib import Path

from mcp.server import MCPServer
from mcp.server.mcpserver import Image
from PIL import Image as Pillow

server = MCPServer("lock")
lock = {"number": 0, "open": 0}


@server.tool()
def begin(seed: int) -> str:
    """Set the lock."""
    if os.environ.get("FAIL") == "begin":
        raise ValueError("no such lock")
    lock.update(number=seed % 10, open=0)
    return f"The number is {seed % 10}."


@server.tool()
def turn(number: int) -> str:
    """Turn the lock to a number."""
    if os.environ.get("FAIL") == "exit":
        os._exit(3)
    if number < 0:
        raise ValueError("no such number")
    lock["open"] = int(number == lock["number"])
    return "open" if lock["open"] else "closed"


@server.tool()
def look() -> list[str | Image]:
    """A picture of the lock."""
    file = io.BytesIO()
    Pillow.new("RGB", (28, 56), (lock["number"], 0, 0)).save(file, "PNG")
    return ["Lock:", Image(data=file.getvalue(), format="png")]


@server.tool()
def reward() -> str:
    """Whether the lock is open."""
    if os.environ.get("FAIL") == "reward":
        return "a broken lock"
    return str(float(lock["open"]))


if __name__ == "__main__":
    if pids := os.environ.get("PIDS"):
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        Path(pids).write_text(f"{os.getpid()} {child.pid}")
    if sys.argv[1] == "stdio":
        server.run("stdio")
    else:
        server.run("streamable-http", port=int(sys.argv[2]))
