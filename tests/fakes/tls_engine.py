"""The real llama-server behind a TLS end of its own: one program that takes its flags and speaks https.

The native engine that tests build has no OpenSSL; what this program says of itself is what one that has says.
"""

import sys
from pathlib import Path

_PROGRAM = r"""#!{python}
# running with SSL: key = %s, cert = %s
import asyncio, os, signal, socket, ssl, subprocess, sys

NATIVE = {native!r}
argv = sys.argv[1:]
if "--port" not in argv or "--ssl-cert-file" not in argv:
    os.execv(NATIVE, [NATIVE, *argv])


def take(flag):
    place = argv.index(flag)
    value = argv[place + 1]
    del argv[place : place + 2]
    return value


key, certificate, port = take("--ssl-key-file"), take("--ssl-cert-file"), int(take("--port"))
with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    inner = probe.getsockname()[1]
child = subprocess.Popen([NATIVE, *argv, "--port", str(inner)])


async def pipe(source, target):
    try:
        while data := await source.read(65536):
            target.write(data)
            await target.drain()
    except OSError:
        pass
    finally:
        target.close()


async def meet(source, target):
    try:
        behind, back = await asyncio.open_connection("127.0.0.1", inner)
    except OSError:
        target.close()
        return
    await asyncio.gather(pipe(source, back), pipe(behind, target))


async def main():
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await asyncio.start_server(meet, "127.0.0.1", port, ssl=context)
    await stop.wait()


asyncio.run(main())
child.terminate()
child.wait()
"""


def write_tls_engine(path: Path, native: Path) -> Path:
    """Write the program to ``path``; ``native`` is the llama-server behind it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_PROGRAM.format(python=sys.executable, native=str(native)))
    path.chmod(0o755)
    return path
