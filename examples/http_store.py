"""Load objects from an HTTP store, with many requests at once.

Where items wait for a server, what counts is how many requests are on the way. `items_in_parallel` fetches that many
items of each batch at once, and waiting needs no GIL, so this pays on every build. Each thread keeps a connection of
its own open. The store is uvicorn in a process of its own; it takes some milliseconds for each request, as stores do.
"""

import argparse
import asyncio
import hashlib
import http.client
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from typing import Any

from common import check, interpreter, items_per_second, standard_library

from dataloader_rs import PyDataloader, PyDataset

Send = Callable[[dict[str, Any]], Awaitable[None]]


class ObjectStore:
    """The server's side: modules of the standard library under their names, and at / their digests as JSON."""

    def __init__(self, latency: float) -> None:
        self.latency = latency  # seconds
        self.objects = {path.name: path.read_bytes() for path in standard_library()[:96]}
        digests = {name: hashlib.sha256(body).hexdigest() for name, body in self.objects.items()}
        self.objects[""] = json.dumps(digests).encode()

    async def __call__(self, scope: dict[str, Any], receive: object, send: Send) -> None:
        """Answer one request, by the protocol of ASGI."""
        await asyncio.sleep(self.latency)
        body = self.objects.get(scope["path"].removeprefix("/"))
        status = 404 if body is None else 200
        body = body or b""
        headers = [(b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def serve(latency: float) -> None:
    """Print the number of a free port and serve on it until standard input ends."""
    import uvicorn

    config = uvicorn.Config(ObjectStore(latency), lifespan="off", log_level="warning", access_log=False)
    server = uvicorn.Server(config)

    def stop_at_end_of_input() -> None:
        sys.stdin.read()
        server.should_exit = True

    threading.Thread(target=stop_at_end_of_input, daemon=True).start()
    # asyncio sends small answers at once on sockets that are said to be TCP, and elsewhere they may wait for 40 ms.
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(128)
        print(listening.getsockname()[1], flush=True)
        server.run(sockets=[listening])


@contextmanager
def running_store(latency: float) -> Generator[int, None, None]:
    """A store in a process of its own; its port. It ends with its standard input, so also if this process is killed."""
    command = [sys.executable, __file__, "--serve", "--latency", str(latency)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        port = server.stdout.readline()
        check(port != "", "the store starts")
        yield int(port)
    check(server.returncode == 0, "the store ends well")


class Objects(PyDataset[bytes]):
    """Objects of a store.

    Thread safety: a connection serves one request at a time, so each thread that asks for items opens its own, and
    keeps it open for the next item. `close` is for when no loader is in the dataset any more.
    """

    def __init__(self, port: int, names: list[str]) -> None:
        super().__init__()
        self.port = port
        self.names = names
        self.own = threading.local()
        self.opened: list[http.client.HTTPConnection] = []

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> bytes:
        return self.fetch(self.names[index])

    def fetch(self, name: str) -> bytes:
        connection = self.connection()
        try:
            return get(connection, name)
        except ConnectionError:  # a server may close a connection that was idle for long: a second try opens it again
            return get(connection, name)

    def connection(self) -> http.client.HTTPConnection:
        """The calling thread's own."""
        connection: http.client.HTTPConnection | None = getattr(self.own, "connection", None)
        if connection is None:
            connection = self.own.connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
            self.opened.append(connection)
        return connection

    def close(self) -> None:
        for connection in self.opened:
            connection.close()


def get(connection: http.client.HTTPConnection, name: str) -> bytes:
    """The body of an object. That of an error is read to its end, too: only then can the connection be used again."""
    try:
        connection.request("GET", f"/{name}")
        response = connection.getresponse()
        body = response.read()
    except BaseException:
        connection.close()  # half an answer may be on the way; the next request opens it again
        raise
    if response.status != 200:
        raise OSError(f"GET /{name}: {response.status} {response.reason}")
    return body


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workers", type=int, default=2, help="batches that are loaded at once (%(default)s)")
    parser.add_argument("--parallel", type=int, default=8, help="items of a batch that are (%(default)s)")
    parser.add_argument("--latency", type=float, default=0.005, help="seconds for each request (%(default)s)")
    parser.add_argument("--serve", action="store_true", help="be the store")
    options = parser.parse_args()
    if options.serve:
        serve(options.latency)
        return 0

    print(interpreter())
    with running_store(options.latency) as port:
        catalogue = Objects(port, [])
        digests: dict[str, str] = json.loads(catalogue.fetch(""))
        catalogue.close()
        names = sorted(digests)
        objects = Objects(port, names)

        def loader(num_workers: int, items_in_parallel: int) -> PyDataloader[bytes, list[bytes]]:
            return PyDataloader(
                objects, batch_size=16, num_workers=num_workers, items_in_parallel=items_in_parallel)

        with loader(options.workers, options.parallel) as batches:
            bodies = [body for batch in batches for body in batch]
        for name, body in zip(names, bodies, strict=True):
            check(hashlib.sha256(body).hexdigest() == digests[name], f"{name} is what the store has")
        threads = max(options.workers, 1) * options.parallel
        check(len(objects.opened) <= threads, "a thread keeps its connection")
        print(f"{len(names)} objects, {sum(map(len, bodies)):,} bytes, over {len(objects.opened)} connections")

        loaders = [loader(0, 1), loader(options.workers, 1), loader(options.workers, options.parallel)]
        alone, together, parallel = items_per_second(loaders)
        for used in loaders:
            used.close()  # waits until no worker is in the dataset
        objects.close()
    print(f"objects per second, one request at a time: {alone}")
    print(f"with {options.workers} workers: {together} ({together.against(alone)})")
    print(f"with {options.workers} workers and {options.parallel} items of each batch in parallel: {parallel} "
          f"({parallel.against(alone)})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
