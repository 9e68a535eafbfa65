"""A fake engine process: it plays one failure that a real engine cannot be made to show. Run as a program.

usage: server_program.py PORT MODE
"""

import http.server
import json
import os
import signal
import socket
import sys
import threading
import time


class Handler(http.server.BaseHTTPRequestHandler):
    ready_at = 0.0
    alias = "kimi-k3"
    mode = ""

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 -- the name is the base class's
        pass

    def do_POST(self) -> None:
        """A request for an answer: it fails, kills the engine, or is worked on for ever."""
        match self.mode:
            case "dies-in-selftest":
                say("0.9 E CUDA error: an illegal memory access was encountered")
                # As under load: nobody answers any more, and the process still has a while to go.
                assert isinstance(self.server, http.server.HTTPServer)
                self.server.socket.close()
                self.connection.shutdown(socket.SHUT_RDWR)
                time.sleep(0.5)
                os._exit(1)
            case "busy":
                time.sleep(60)
            case _:
                self.answer(500, {"error": {"message": "no slot was ever made", "type": "server_error"}})

    def do_GET(self) -> None:
        ready = time.monotonic() >= self.ready_at
        if self.path == "/slots":
            if self.mode == "amid-a-batch" and time.monotonic() < self.ready_at + 1.0:
                time.sleep(1.0)  # llama-server answers this between two batches
            at_work = self.mode == "busy" or (self.mode == "ends-soon" and time.monotonic() < self.ready_at + 1.0)
            self.answer(200, [{"id": 0, "is_processing": at_work}])
            return
        if self.mode == "names-no-model" and self.path == "/v1/models":
            self.answer(503, {"error": {"message": "Loading model", "code": 503}})
            return
        body = {"data": [{"id": self.alias}]} if self.path == "/v1/models" else {"status": "ok" if ready else "loading"}
        self.answer(200 if ready else 503, body)

    def answer(self, status: int, body: object) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def later(seconds: float, action: str) -> None:
    """Die in a while, in a way of one's own."""

    def act() -> None:
        time.sleep(seconds)
        match action:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "sigill":
                os.kill(os.getpid(), signal.SIGILL)
            case _:
                say(action)
                os._exit(1)

    threading.Thread(target=act, daemon=True).start()


OUT_OF_MEMORY = (
    "0.0.1 E ggml_backend_cuda_buffer_type_alloc_buffer: allocating 9 MiB on device 0: cudaMalloc failed: out of "
    "memory\n"
    "0.0.2 E srv  llama_server: exiting due to model loading error"
)
SLOW_SECONDS = {"slow": 1.0, "stalls": 3.0, "killed-while-loading": float("inf"), "illegal-instruction": float("inf")}
DEATHS = {
    "killed-while-loading": (0.3, "kill"),
    "illegal-instruction": (0.3, "sigill"),
    "dies-while-serving": (1.0, "0.1 E CUDA error: an illegal memory access was encountered"),
    "hangs": (0.3, "stop"),
}


def main() -> None:
    if "--port" in sys.argv:  # in place of a real engine: its own arguments, the mode in the environment
        port, mode = int(sys.argv[sys.argv.index("--port") + 1]), os.environ["FAKE_MODE"]
    else:
        port, mode = int(sys.argv[1]), sys.argv[2]
    say("0.00.000.001 I srv  fake: loading model")
    if mode == "dies-silently":
        os._exit(3)
    if mode == "cuda-oom":
        say(OUT_OF_MEMORY)
        os._exit(1)
    Handler.mode = mode
    if mode == "stranger":
        Handler.alias = "another-model"
    Handler.ready_at = time.monotonic() + SLOW_SECONDS.get(mode, 0.0)
    if mode in DEATHS:
        later(*DEATHS[mode])
    http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    main()
