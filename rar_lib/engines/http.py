"""A server as an engine sees it: JSON in, JSON out, and every failure names the URL.

A server that this process started also has a process and a log: when it stops answering, the error says how it ended and
where its last words lie. It listens on 127.0.0.1 and ends with this process, whichever way that ends; the kernel sees to
it when the thread that started it is gone (Linux), so start it from a thread that stays.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import rar_lib
from rar_lib.engines.vllm_serve import PARENT
from rar_lib.errors import EngineError

logger = logging.getLogger("rar")
CONNECT_SECONDS = 10.0
START_SECONDS = 600.0  # importing vLLM and loading a large model
TELL_SECONDS = 30.0  # between two lines that say what a start waits for
STOP_SECONDS = 20.0
SETTLE_SECONDS = 5.0
LAUNCHERS = (
    "MASTER_",
    "TORCHELASTIC_",
    "GROUP_",
    "ROLE_",
    "LOCAL_",
    "RANK",
    "WORLD_SIZE",
)  # of torchrun, not meant for it


class OwnServer:
    """A vLLM server in a process of its own.

    Args:
        checkpoint: folder to load.
        dtype: of its arithmetic.

    Raises:
        EngineError: if it ends before it answers; names the log and its last lines.
    """

    def __init__(self, checkpoint: Path, dtype: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="rar-server-"))
        self.log = self.folder / "server.log"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "rar_lib.engines.vllm_serve", str(checkpoint), "--port", str(port)]
        environment = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHERS)}
        environment["PYTHONPATH"] = os.pathsep.join(
            part for part in (str(Path(rar_lib.__file__).parent.parent), os.environ.get("PYTHONPATH")) if part
        )
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, "--dtype", dtype, "--disable-uvicorn-access-log"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # an interrupt of this process, such as a notebook's, is none of the server
                env=environment | {PARENT: str(os.getpid())},
            )
        self._end = weakref.finalize(self, _stop, self.process, self.folder)

    def state(self) -> str:
        """How the process fares, and where its log lies; from here on the log is kept."""
        self._end.detach()
        self._end = weakref.finalize(self, _stop, self.process, None)
        code = self.process.poll()
        how = "is still running" if code is None else f"ended with {_exit(code)}"
        return f"its process {self.process.pid} {how}; log: {self.log}"

    def last_lines(self, count: int = 3) -> str:
        """The end of the log."""
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return " | ".join(lines[-count:])

    def stop(self) -> None:
        """End the process and remove its files; a log that an error named stays."""
        self._end()


def _exit(code: int) -> str:
    return f"status {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"


def _stop(process: subprocess.Popen[bytes], folder: Path | None) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # its engine is a process of its own in the same group
            process.wait()
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


class Server:
    """A client of one server.

    Args:
        url: where it listens, without a path.
        own: its process, if this process started it.

    Raises:
        EngineError: if httpx is not installed.
    """

    def __init__(self, url: str, own: OwnServer | None = None) -> None:
        try:
            import httpx
        except ImportError as error:
            raise EngineError(f"{url}: httpx is not installed ({error}); install the extra rar-lib[hf]") from None
        self.url, self.own = url.rstrip("/"), own
        self._errors = (httpx.HTTPError, httpx.InvalidURL)
        keep_alive = [
            (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        ]  # a machine that vanishes ends the wait for its answer
        self._client = httpx.Client(
            base_url=self.url,
            timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),  # a rollout may take any time
            transport=httpx.HTTPTransport(socket_options=keep_alive),
            trust_env=False,  # a rollout engine is not behind a proxy
        )

    def post(self, path: str, body: Mapping[str, Any] | None = None, *, expected: str) -> Any:
        """What a POST answers.

        Args:
            path: of the endpoint.
            body: JSON.
            expected: what the answer should be, in words, for the error.

        Raises:
            EngineError: if the server does not answer, refuses, or answers no JSON.
        """
        return self._ask("POST", path, body or {}, expected)

    def get(self, path: str, *, expected: str) -> Any:
        """What a GET answers. Raises as `post`."""
        return self._ask("GET", path, None, expected)

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None, expected: str) -> Any:
        try:
            answer = self._client.request(method, path, json=body)
        except self._errors as error:
            if self.own is not None:  # a connection breaks a moment before its process is gone
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.own.process.wait(SETTLE_SECONDS)
            raise self.error(path, expected, f"no answer ({type(error).__name__}: {error})") from None
        if answer.status_code != 200:
            raise self.error(path, expected, f"status {answer.status_code}: {answer.text:.300}")
        try:
            return answer.json()
        except ValueError:
            raise self.error(path, expected, f"no JSON: {answer.text:.100}") from None

    def error(self, path: str, expected: str, found: str) -> EngineError:
        """An error that names the URL, and the process and log of a server of our own."""
        own = "" if self.own is None else f"; {self.own.state()}"
        return EngineError(f"{self.url}{path}: expected {expected}, found {found}{own}")

    def wait_until_up(self) -> None:
        """Wait for a server of our own to answer.

        Raises:
            EngineError: if its process ends first, or takes longer than START_SECONDS.
        """
        assert self.own is not None
        before = told = time.monotonic()
        while True:
            code = self.own.process.poll()
            if code is not None:
                raise self.error("", "a server that starts", f"its end: {self.own.last_lines()}")
            try:
                if self._client.get("/health").status_code == 200:
                    return
            except self._errors:
                pass
            if time.monotonic() - before > START_SECONDS:
                raise self.error("/health", f"an answer within {START_SECONDS:.0f} s", self.own.last_lines())
            if time.monotonic() - told > TELL_SECONDS:
                told = time.monotonic()
                logger.info("%s: no answer after %.0f s; log: %s", self.url, told - before, self.own.log)
            time.sleep(0.1)

    def close(self) -> None:
        """Close the connections, and end a server of our own."""
        self._client.close()
        if self.own is not None:
            self.own.stop()
