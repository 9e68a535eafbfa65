"""Text from a model or a server, made safe: to show on a terminal, and to send as JSON."""

import re
from typing import Final

_COMMANDS: Final = re.compile(
    "["
    "\x00-\x08\x0b\x0c\x0e-\x1f"  # C0 without tab and line feed; escape sequences begin with one of them
    "\x7f-\x9f"  # DEL and C1, of which \x9b is a whole CSI
    "\u2028-\u202e\u2066-\u2069"  # line separators, and marks that show text in another order than it has
    "\ud800-\udfff\ufff9-\ufffb\U000e0000-\U000e007f"  # halves of characters, and characters nobody sees
    "]"
)
_SURROGATES: Final = re.compile("[\ud800-\udfff]")


def printable(text: str) -> str:
    """The text without characters by which it could command a terminal; line ends, tabs and all letters stay."""
    return _COMMANDS.sub("\ufffd", text.replace("\r", ""))


def sendable(text: str) -> str:
    """The text without lone surrogates, which no UTF-8 holds: a JSON escape or a bad byte of stdin can make one."""
    return _SURROGATES.sub("\ufffd", text)
