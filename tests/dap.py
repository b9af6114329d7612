"""A small client of the Debug Adapter Protocol (https://microsoft.github.io/debug-adapter-protocol), as in editors."""

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
    """One connection to a debug adapter, from its greeting to the goodbye; every wait has an end.

    Args:
        port: Where it listens on this machine.
        command: What the session does, ``attach`` or ``launch``.
        settings: An editor's configuration of that.
    """

    def __init__(self, port: int, command: str, settings: Message) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=180)
        self.stream = self.socket.makefile("rb")
        self.sent, self.unread = 0, list[Message]()
        self.request("initialize", adapterID="debugpy", pathFormat="path")
        self.opening = self.send(command, settings)
        self.wait_for(lambda message: message.get("event") == "initialized")

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, where: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Leave; a program that was attached to goes on, and one that was launched ends."""
        with suppress(OSError):  # The adapter has left already.
            self.socket.shutdown(socket.SHUT_RDWR)  # Wakes a thread that reads.
        self.stream.close()
        self.socket.close()

    def send(self, command: str, arguments: Message) -> int:
        """Send a request and give its number."""
        self.sent += 1
        body = json.dumps({"seq": self.sent, "type": "request", "command": command, "arguments": arguments}).encode()
        self.socket.sendall(b"Content-Length: %d\r\n\r\n" % len(body) + body)
        return self.sent

    def read(self) -> Message:
        """The next message of the adapter."""
        length = 0
        while line := self.stream.readline().strip():
            length = int(line.removeprefix(b"Content-Length: "))
        if not length:
            raise EOFError("the debug adapter has gone")
        return json.loads(self.stream.read(length))

    def wait_for(self, wanted: Callable[[Message], bool]) -> Message:
        """The first message, of those that came already and those that come, that is wanted; others stay unread."""
        for message in self.unread:
            if wanted(message):
                self.unread.remove(message)
                return message
        while not wanted(message := self.read()):
            self.unread.append(message)
        return message

    def answer(self, number: int) -> Message:
        """What the adapter says to a request."""
        answer = self.wait_for(lambda message: message.get("request_seq") == number)
        assert answer["success"], answer
        return answer.get("body", {})

    def request(self, command: str, **arguments: Any) -> Message:
        """Send a request and wait for what the adapter says to it."""
        return self.answer(self.send(command, arguments))

    def event(self, name: str) -> Message:
        """Wait for an event."""
        return self.wait_for(lambda message: message.get("event") == name).get("body", {})

    def set_breakpoints(self, file: Path, *points: Message) -> None:
        """Set these breakpoints of a file, and no others."""
        told = self.request("setBreakpoints", source={"path": str(file)}, breakpoints=list(points))
        assert all(point["verified"] for point in told["breakpoints"]), told

    def go(self) -> None:
        """All breakpoints are set: let the program run."""
        self.request("configurationDone")
        self.answer(self.opening)

    def evaluate(self, expression: str, thread: int) -> str:
        """The value of an expression in the innermost frame of a thread that stands still."""
        frame = self.request("stackTrace", threadId=thread)["stackFrames"][0]
        return self.request("evaluate", expression=expression, frameId=frame["id"])["result"]


def line_of(file: Path, text: str) -> int:
    """The number of the one line that holds a text."""
    (number,) = [number for number, line in enumerate(file.read_text().splitlines(), start=1) if text in line]
    return number
