"""The frame around every message, and the order a connection must keep."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from longwire.errors import BadFrame, BadRequest, Unauthenticated, UnknownCommand
from longwire.wire.constants import Command
from longwire.wire.dialects import LX_OFFER, Dialect, Shape

__all__ = ["ANSWER_HEADER", "REQUEST_HEADER", "ServerOrder", "command_name"]

REQUEST_HEADER = struct.Struct("<BQ")
"""Command number, body length."""

ANSWER_HEADER = struct.Struct("<Q")
"""Body length; answers carry nothing else, and come in request order."""


def command_name(number: int) -> str:
    """The command's name, or its number in hex for one nobody knows."""
    try:
        return Command(number).name
    except ValueError:
        return f"0x{number:02x}"


@dataclass(slots=True)
class ServerOrder:
    """What a server admits next on one connection: HELLO, then all the rest."""

    dialect: Dialect
    greeted: bool = False
    locked: bool = False
    """A token has to be proven before anything but the handshake."""

    def admit(self, number: int, length: int) -> Shape:
        """Check one request header before any of its body is read.

        Raises:
            UnknownCommand: not a command of this dialect.
            BadFrame: a length the command cannot have.
            BadRequest: something before HELLO, or a second HELLO.
            Unauthenticated: something that needs a token first.
        """
        shape = self.dialect.shapes.get(number)
        if shape is None:
            raise UnknownCommand(number, self.dialect.version)
        if (number == Command.HELLO) is self.greeted:
            name = command_name(number)
            raise BadRequest(name, "a second HELLO" if self.greeted else "no HELLO")
        if not shape.least <= length <= shape.most:
            expected = (
                f"{shape.least}"
                if shape.least == shape.most
                else f"{shape.least} to {shape.most}"
            )
            raise BadFrame(command_name(number), length, expected)
        if self.locked and self.greeted and number not in LX_OFFER:
            reason = "a token is needed first (llama.cpp: through longwire tunnel)"
            raise Unauthenticated(command_name(number), reason)
        self.greeted = True
        return shape
