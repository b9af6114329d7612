"""A small client of the Debug Adapter Protocol (https://microsoft.github.io/debug-adapter-protocol), like an editor."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

Message = dict[str, Any]


class Session:
    """One connection to a debug adapter, initialized when it is created; every wait has a timeout.

    Args:
        port: The port on this machine at which the adapter listens.
        command: ``attach`` or ``launch``.
        settings: The arguments of the command, as in an editor's configuration.
    """

    def __init__(self, port: int, command: str, settings: Message) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=180)
        self.stream = self.socket.makefile("rb")
        self.sent, self.unread = 0, list[Message]()
        self.request("initialize", adapterID="debugpy", pathFormat="path")
        self.start_request = self.send(command, settings)
        self.wait_for(lambda message: message.get("event") == "initialized")

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, where: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Disconnect; an attached program continues, and a launched one ends."""
        with suppress(OSError):  # The adapter has already disconnected.
            self.socket.shutdown(socket.SHUT_RDWR)  # Wakes a thread that is reading.
        self.stream.close()
        self.socket.close()

    def send(self, command: str, arguments: Message) -> int:
        """Send a request and return its number."""
        self.sent += 1
        body = json.dumps({"seq": self.sent, "type": "request", "command": command, "arguments": arguments}).encode()
        self.socket.sendall(b"Content-Length: %d\r\n\r\n" % len(body) + body)
        return self.sent

    def read(self) -> Message:
        """Return the adapter's next message."""
        length = 0
        while line := self.stream.readline().strip():
            length = int(line.removeprefix(b"Content-Length: "))
        if not length:
            raise EOFError("the debug adapter closed the connection")
        return json.loads(self.stream.read(length))

    def wait_for(self, wanted: Callable[[Message], bool]) -> Message:
        """Return the first wanted message, of those received before or from now on; the others stay unread."""
        for message in self.unread:
            if wanted(message):
                self.unread.remove(message)
                return message
        while not wanted(message := self.read()):
            self.unread.append(message)
        return message

    def response(self, number: int) -> Message:
        """Wait for the response to a request, and return its body."""
        response = self.wait_for(lambda message: message.get("request_seq") == number)
        assert response["success"], response
        return response.get("body", {})

    def request(self, command: str, **arguments: Any) -> Message:
        """Send a request, wait for the response, and return its body."""
        return self.response(self.send(command, arguments))

    def event(self, name: str) -> Message:
        """Wait for an event, and return its body."""
        return self.wait_for(lambda message: message.get("event") == name).get("body", {})

    def set_breakpoints(self, file: Path, *points: Message) -> None:
        """Replace all breakpoints of a file by these."""
        response = self.request("setBreakpoints", source={"path": str(file)}, breakpoints=list(points))
        assert all(point["verified"] for point in response["breakpoints"]), response

    def go(self) -> None:
        """Let the program run, after all breakpoints are set."""
        self.request("configurationDone")
        self.response(self.start_request)

    def evaluate(self, expression: str, thread: int) -> str:
        """Return the value of an expression in the innermost frame of a stopped thread."""
        frame = self.request("stackTrace", threadId=thread)["stackFrames"][0]
        return self.request("evaluate", expression=expression, frameId=frame["id"])["result"]


def line_of(file: Path, text: str) -> int:
    """Return the number of the only line that contains ``text``."""
    (number,) = [number for number, line in enumerate(file.read_text().splitlines(), start=1) if text in line]
    return number
