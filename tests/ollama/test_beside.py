"""The bridge's port is this server's from before the load to after the end, and free for the next one at once."""

import json
import socket
import urllib.request

import pytest
from fakes.processes import free_port

from kimigguf.errors import MachineError
from kimigguf.ollama.beside import check_bridge, held, running


def served(port: int) -> socket.socket:
    """A program that comes for the port as servers do: with the option that lets it take over what only closes."""
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind(("127.0.0.1", port))
        made.listen()
    except OSError:
        made.close()
        raise
    return made


def test_nobody_takes_the_port_during_the_load() -> None:
    port = free_port()
    with held(port), pytest.raises(OSError, match="in use"):
        served(port).close()


def test_a_port_that_is_taken_is_refused_before_the_load() -> None:
    port = free_port()
    with served(port), pytest.raises(MachineError) as error:
        check_bridge(port)
    assert (error.value.code, error.value.exit_code) == ("port-in-use", 3)


def test_the_port_can_be_had_again_at_once_while_old_connections_close() -> None:
    port = free_port()
    for _ in range(2):
        with held(port) as taken, running(taken, "http://127.0.0.1:9", None):
            asking = socket.create_connection(("127.0.0.1", port))
            asking.sendall(b"GET /api/version HTTP/1.0\r\nHost: localhost\r\n\r\n")
            assert b'"version"' in asking.makefile("rb").read()  # the server closed first: its side waits
            asking.close()
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/version") as reply:
                assert "version" in json.load(reply)
