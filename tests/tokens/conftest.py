import json
import re
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from tomat.codec.histogram import DensityHistogram
from tomat.codec.lloyd_max import LloydMaxCodec, fit_lloyd_max
from tomat.density.grid import DensityGrid

MakeGrid = Callable[..., DensityGrid]


def _make_grid(shape=(10, 12, 9), n_atoms=3, seed=0, material_id="", lattice=None) -> DensityGrid:
    """A smooth, periodic, positive density with a value of its own at every voxel, in a cell that is not orthogonal."""
    rng = np.random.default_rng(seed)
    x, y, z = (np.arange(n) / n for n in shape)
    phase = rng.uniform(0, 1, 3)
    log_rho = (
        np.cos(2 * np.pi * (x[:, None, None] + phase[0]))
        + np.cos(2 * np.pi * (y[None, :, None] + phase[1]))
        + np.cos(2 * np.pi * (z[None, None, :] + phase[2]))
    )
    rho = np.exp(log_rho + rng.normal(0, 0.05, shape))
    if lattice is None:
        lattice = [[3.1, 0, 0], [0.4, 4.2, 0], [-0.3, 0.2, 5.3]]
    numbers = rng.integers(1, 119, n_atoms)
    return DensityGrid(rho, np.array(lattice), numbers, rng.uniform(0, 1, (n_atoms, 3)), material_id=material_id)


@pytest.fixture(scope="session")
def make_grid() -> MakeGrid:
    return _make_grid


@pytest.fixture(scope="session")
def codec(make_grid) -> LloydMaxCodec:
    histogram = DensityHistogram()
    for seed in range(3):
        histogram.add(make_grid(seed=seed).rho)
    return fit_lloyd_max(histogram, 256)


class _BucketHandler(BaseHTTPRequestHandler):
    """The part of the Cloud Storage JSON API that TensorStore uses: media upload and download, metadata, list, delete.

    Objects live in `server.objects`, name to (content, generation); preconditions on the generation hold, or a writer
    would silently overwrite another.
    """

    protocol_version = "HTTP/1.1"
    server: "BucketServer"

    def do_GET(self) -> None:
        path, query = self._request()
        name = self._object_name(path)
        if name is None:
            prefix, start, end = (query.get(key, "") for key in ("prefix", "startOffset", "endOffset"))
            with self.server.lock:
                names = sorted(n for n in self.server.objects if n.startswith(prefix) and n >= start)
                items = [self._metadata(n) for n in names if not end or n < end]
            self._answer(200, json.dumps({"kind": "storage#objects", "items": items}).encode())
            return
        with self.server.lock:
            content, generation = self.server.objects.get(name, (None, 0))
            metadata = None if content is None else self._metadata(name)
        if content is None:
            self._answer(404)
        elif query.get("alt") != "media":
            self._answer(200, json.dumps(metadata).encode())
        elif query.get("ifGenerationNotMatch") == str(generation):
            self._answer(304, generation=generation)
        else:
            first, last = 0, len(content)
            if wanted := re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", "")):
                low, high = wanted.groups()
                first = int(low) if low else len(content) - int(high)
                last = int(high) + 1 if low and high else len(content)
            span = {"Content-Range": f"bytes {first}-{min(last, len(content)) - 1}/{len(content)}"} if wanted else {}
            self._answer(206 if wanted else 200, content[first:last], generation, span)

    def do_POST(self) -> None:
        path, query = self._request()
        content = self.rfile.read(int(self.headers["Content-Length"]))
        name = query["name"]
        with self.server.lock:
            _, generation = self.server.objects.get(name, (b"", 0))
            if query.get("ifGenerationMatch", str(generation)) != str(generation):
                self._answer(412)
                return
            self.server.generation += 1
            self.server.objects[name] = content, self.server.generation
            metadata = self._metadata(name)
        self._answer(200, json.dumps(metadata).encode())

    def do_DELETE(self) -> None:
        path, _ = self._request()
        with self.server.lock:
            found = self.server.objects.pop(self._object_name(path) or "", None)
        self._answer(204 if found else 404)

    def log_message(self, format: str, *args: object) -> None:
        """Requests are not printed."""

    def _request(self) -> tuple[str, dict[str, str]]:
        url = urllib.parse.urlsplit(self.path)
        return url.path, dict(urllib.parse.parse_qsl(url.query))

    def _object_name(self, path: str) -> str | None:
        found = re.fullmatch(r"/storage/v1/b/[^/]+/o/(.+)", path)
        return None if found is None else urllib.parse.unquote(found.group(1))

    def _metadata(self, name: str) -> dict[str, str]:
        content, generation = self.server.objects[name]
        return {"name": name, "bucket": "bucket", "size": str(len(content)), "generation": str(generation)}

    def _answer(self, status: int, content: bytes = b"", generation: int = 0, headers: dict | None = None) -> None:
        self.send_response(status)
        for key, value in {"x-goog-generation": str(generation), **(headers or {})}.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


class BucketServer(ThreadingHTTPServer):
    """A bucket at `url`; a process reads it as `gs://bucket/` with the environment `environment`."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _BucketHandler)
        self.objects: dict[str, tuple[bytes, int]] = {}
        self.generation = 0
        self.lock = threading.RLock()

    @property
    def environment(self) -> dict[str, str]:
        address = f"127.0.0.1:{self.server_address[1]}"
        metadata = {key: address for key in ("GCE_METADATA_HOST", "GCE_METADATA_IP", "GCE_METADATA_ROOT")}
        return {
            "TENSORSTORE_GCS_HTTP_URL": f"http://{address}",
            "STORAGE_EMULATOR_HOST": f"http://{address}",
            **metadata,
        }


@pytest.fixture
def bucket() -> Iterator[BucketServer]:
    with BucketServer() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()
