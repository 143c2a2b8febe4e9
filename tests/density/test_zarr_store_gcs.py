"""`gs://` for real: gcsfs against a small server that speaks the reading half of the Cloud Storage JSON API."""

import json
import re
import threading
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from tomat.base.errors import TomatError
from tomat.density.io import open_density
from tomat.density.zarr_store import list_zarr, read_zarr, write_zarr


class Bucket(ThreadingHTTPServer):
    """Serves the files under `root` as the objects of the bucket `densities`."""

    daemon_threads = True

    def __init__(self, root: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.root = root

    def names(self) -> list[str]:
        return sorted(str(file.relative_to(self.root)) for file in self.root.rglob("*") if file.is_file())


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.0"  # a connection a request: none is left open when the test ends
    server: Bucket

    def do_GET(self) -> None:
        url = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(url.query))
        found = re.fullmatch(r"(?:/download)?/storage/v1/b/densities/o/(.+)", url.path)
        if found is None:
            self.answer(200, json.dumps(self.listing(query.get("prefix", ""), query.get("delimiter", ""))).encode())
            return
        name = urllib.parse.unquote(found.group(1))
        if name not in self.server.names():
            self.answer(404, b"{}")
            return
        content = (self.server.root / name).read_bytes()
        if query.get("alt") == "media":
            self.answer(200, content)
        else:
            self.answer(200, json.dumps(self.metadata(name)).encode())

    def listing(self, prefix: str, delimiter: str) -> dict:
        names = [name for name in self.server.names() if name.startswith(prefix)]
        if not delimiter:
            return {"items": [self.metadata(name) for name in names]}
        rest = {name: name[len(prefix) :] for name in names}
        folders = {prefix + tail.split(delimiter)[0] + delimiter for tail in rest.values() if delimiter in tail}
        return {
            "items": [self.metadata(name) for name, tail in rest.items() if delimiter not in tail],
            "prefixes": sorted(folders),
        }

    def metadata(self, name: str) -> dict[str, str]:
        size = (self.server.root / name).stat().st_size
        return {"name": name, "bucket": "densities", "size": str(size), "updated": "2026-01-01T00:00:00.000Z"}

    def answer(self, status: int, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Content-Type", "application/octet-stream")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Requests are not printed."""


@pytest.fixture
def bucket(tmp_path, monkeypatch):
    import gcsfs

    with Bucket(tmp_path) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        address = f"127.0.0.1:{server.server_address[1]}"
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://{address}")
        for name in ("GCE_METADATA_HOST", "GCE_METADATA_IP", "GCE_METADATA_ROOT"):
            monkeypatch.setenv(name, address)
        gcsfs.GCSFileSystem.clear_instance_cache()
        yield server
        gcsfs.GCSFileSystem.clear_instance_cache()
        server.shutdown()
        thread.join()


def test_materials_are_listed_and_read(bucket, grid):
    write_zarr(grid, bucket.root / "rho_gga" / "mp-1.zarr", chunks=4)
    write_zarr(grid, bucket.root / "rho_gga" / "mp-2.zarr")
    locations = list_zarr("gs://densities/rho_gga")
    assert locations == ["gs://densities/rho_gga/mp-1.zarr", "gs://densities/rho_gga/mp-2.zarr"]
    for location in locations:
        np.testing.assert_allclose(open_density(location).rho, grid.rho, rtol=3e-7)


def test_a_lost_object_is_noticed(bucket, grid):
    write_zarr(grid, bucket.root / "mp-1.zarr", chunks=2)
    lost = [name for name in bucket.names() if "/c/" in name][3]
    (bucket.root / lost).unlink()
    with pytest.raises(TomatError, match="1 of 18 chunks of 'charge_density_total' are missing"):
        read_zarr("gs://densities/mp-1.zarr")


def test_an_absent_material_is_one_error(bucket):
    with pytest.raises(TomatError, match="gs://densities/mp-9.zarr is not a readable Zarr group"):
        read_zarr("gs://densities/mp-9.zarr")
    with pytest.raises(TomatError, match="under gs://densities/nothing|cannot list gs://densities/nothing"):
        list_zarr("gs://densities/nothing")
