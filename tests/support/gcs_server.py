"""A small Google Cloud Storage: the part of its JSON API that gcsfs and TensorStore use, with faults on demand.

Objects in memory, with generations and preconditions that hold, media, multipart and resumable uploads, ranges (suffix
ranges too), lists with delimiter and pages, deletes, and the metadata server of a virtual machine. Run alone it serves
a bucket for experiments, as `tokenize/README.md` shows.
"""

import argparse
import base64
import datetime
import hashlib
import json
import re
import threading
import urllib.parse
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from random import Random
from typing import Literal

import google_crc32c

Fault = Literal["429", "503", "drop", "truncate", "stall"]
"""A status; the connection closed without an answer; an answer cut off half-way, its full length announced; no answer
for as long as the server lives, as of a network that is cut."""

CONDITION = "At least one of the pre-conditions you specified did not hold."
"""Google's words for 412."""


@dataclass
class Faults:
    """Which requests go wrong."""

    share: float = 0.0
    """Part of all requests that fail."""
    kinds: tuple[Fault, ...] = ("429", "503", "drop", "truncate")
    only: Callable[[str, str], bool] = lambda method, path: True
    """Method and path of the requests that may fail."""
    counts: Counter = field(default_factory=Counter)
    """How many of each kind there were."""
    random: Random = field(default_factory=lambda: Random(0))
    lock: threading.Lock = field(default_factory=threading.Lock)

    def draw(self, method: str, path: str) -> Fault | None:
        with self.lock:
            if not self.only(method, path) or self.random.random() >= self.share:
                return None
            kind = self.random.choice(self.kinds)
            self.counts[kind] += 1
            return kind


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: "BucketServer"

    def log_message(self, format: str, *args: object) -> None:
        """Requests are not printed."""

    def do_GET(self) -> None:
        url, method = urllib.parse.urlsplit(self.path), self.command
        self.query = dict(urllib.parse.parse_qsl(url.query))
        self.content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.fault = None if "computeMetadata" in url.path else self.server.faults.draw(method, url.path)
        if self.fault in ("429", "503"):
            return self._refuse(int(self.fault), "injected")
        if self.fault == "stall":
            self.server.closed.wait()
            self.close_connection = True
            return
        if self.fault == "drop":
            # Also after the request was carried out: the client cannot know, and has to ask again.
            if self.server.faults.random.random() < 0.5:
                self._route(method, url.path, silent=True)
            self.close_connection = True
        else:
            self._route(method, url.path)

    do_POST = do_PUT = do_DELETE = do_GET

    def _route(self, method: str, path: str, silent: bool = False) -> None:
        self.silent = silent
        if "computeMetadata" in path and self.headers.get("Metadata-Flavor") != "Google":
            self._answer(403)  # as the real one, which answers nobody who does not name the flavour
        elif "computeMetadata" in path:
            answers = {"instance/zone": f"projects/1/zones/{self.server.worker_zone}", "project/project-id": "emulated"}
            answers |= {"project/numeric-project-id": "1", "universe/universe-domain": "googleapis.com"}
            answers |= {f"instance/{key}": value for key, value in self.server.machine.items()}
            answer = answers.get(path.removeprefix("/computeMetadata/v1/")) if self.server.worker_zone else None
            kind = "application/json" if (answer or "").startswith("{") else "application/text"
            headers = {"Metadata-Flavor": "Google", "Content-Type": kind}
            self._answer(200, answer.encode(), headers=headers) if answer else self._answer(404)
        elif found := re.fullmatch(r"(?:/upload|/resumable/upload)/storage/v1/b/([^/]+)/o", path):
            self._upload(method, found.group(1))
        elif found := re.fullmatch(r"(?:/download)?/storage/v1/b/([^/]+)/o/(.+)", path):
            self._object(method, found.group(1), urllib.parse.unquote(found.group(2)))
        elif (found := re.fullmatch(r"/storage/v1/b/([^/]+)/o/?", path)) and method == "GET":
            self._list(found.group(1))
        elif (found := re.fullmatch(r"/storage/v1/b/([^/]+)/?", path)) and method == "GET":
            name = found.group(1)
            body = {"kind": "storage#bucket", "name": name, "location": self.server.regions.get(name, "")}
            self._answer(200 if name in self.server.regions else 404, json.dumps(body).encode())
        else:
            self._refuse(404, "no such method")

    def _object(self, method: str, bucket: str, name: str) -> None:
        server, key = self.server, (bucket, name)
        with server.lock:
            content, generation = server.stored.get(key, (None, 0))
            metadata = None if content is None else server.metadata(key)
            if method == "DELETE":
                if self.query.get("ifGenerationMatch", str(generation)) != str(generation):
                    return self._answer(412)
                server.stored.pop(key, None)
                return self._answer(404 if content is None else 204)
        if content is None or method != "GET":
            self._refuse(404, "No such object")
        elif self.query.get("alt") != "media":
            self._answer(200, json.dumps(metadata).encode())
        elif self.query.get("ifGenerationNotMatch") == str(generation):
            self._answer(304, generation=generation)
        elif self.query.get("ifGenerationMatch", str(generation)) != str(generation):
            self._answer(412)
        else:
            first, last = 0, len(content)
            if wanted := re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", "")):
                low, high = wanted.groups()
                first = int(low) if low else max(len(content) - int(high), 0)
                last = min(int(high) + 1, len(content)) if low and high else len(content)
            headers = {"Content-Range": f"bytes {first}-{last - 1}/{len(content)}"} if wanted else {}
            self._answer(206 if wanted else 200, content[first:last], generation, headers)

    def _list(self, bucket: str) -> None:
        query = self.query
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        first, end, after = query.get("startOffset", ""), query.get("endOffset", ""), query.get("pageToken", "")
        with self.server.lock:
            if bucket not in self.server.regions:
                return self._refuse(404, "The specified bucket does not exist.")
            names = sorted(n for b, n in self.server.stored if b == bucket and n.startswith(prefix))
            items, prefixes, token = [], [], ""
            for name in (one for one in names if first <= one and after < one and (not end or one < end)):
                if len(items) == int(query.get("maxResults") or 1000):
                    token = items[-1]["name"]
                    break
                folder, found, _ = name[len(prefix) :].partition(delimiter or "\0")
                if found:
                    prefixes.append(prefix + folder + delimiter)
                else:
                    items.append(self.server.metadata((bucket, name)))
        body = {"kind": "storage#objects", "items": items, "prefixes": sorted(set(prefixes))}
        self._answer(200, json.dumps(body | ({"nextPageToken": token} if token else {})).encode())

    def _upload(self, method: str, bucket: str) -> None:
        kind = self.query.get("uploadType")
        if method == "PUT" or (kind == "resumable" and "upload_id" in self.query):
            self._resumable_part()
        elif kind == "resumable":
            name = self.query.get("name") or json.loads(self.content or b"{}").get("name", "")
            with self.server.lock:
                upload = f"{len(self.server.uploads) + 1}"
                self.server.uploads[upload] = (bucket, name, bytearray(), self.query.get("ifGenerationMatch"))
            location = f"{self.server.url}/upload/storage/v1/b/{bucket}/o?uploadType=resumable&upload_id={upload}"
            self._answer(200, b"{}", headers={"Location": location})
        elif kind == "multipart":
            boundary = re.search(r"""boundary=["']?([^"';]+)""", self.headers["Content-Type"])
            assert boundary is not None
            parts = self.content.split(b"--" + boundary.group(1).encode())[1:-1]
            bodies = [re.split(rb"\r\n\r\n|\n\n", part, maxsplit=1)[1] for part in parts]
            name = json.loads(bodies[0])["name"]
            self._store(bucket, name, re.sub(rb"\r?\n\Z", b"", bodies[1]), self.query.get("ifGenerationMatch"))
        else:
            self._store(bucket, self.query["name"], self.content, self.query.get("ifGenerationMatch"))

    def _resumable_part(self) -> None:
        with self.server.lock:
            bucket, name, content, condition = self.server.uploads[self.query["upload_id"]]
            span = re.fullmatch(r"bytes (?:(\d+)-(\d+)|\*)/(\d+|\*)", self.headers.get("Content-Range", ""))
            if span and span.group(1) is not None:
                content[int(span.group(1)) :] = self.content
            elif not span:
                content[:] = self.content
            total = span.group(3) if span else str(len(content))
        if total != "*" and len(content) == int(total):
            self._store(bucket, name, bytes(content), condition)
        else:
            received = {"Range": f"bytes=0-{len(content) - 1}"} if content else {}
            self._answer(308, headers=received)

    def _store(self, bucket: str, name: str, content: bytes, condition: str | None) -> None:
        """`condition`: the generation that must be there, which of a resumable upload is said as it begins and judged
        as it ends (googleapis/google-cloud-java 201)."""
        with self.server.lock:
            if bucket not in self.server.regions:
                return self._refuse(404, "The specified bucket does not exist.")
            _, generation = self.server.stored.get((bucket, name), (b"", 0))
            if condition not in (None, str(generation)):
                return self._refuse(412, CONDITION)
            self.server.put(bucket, name, content)
            metadata = self.server.metadata((bucket, name))
        self._answer(200, json.dumps(metadata).encode())

    def _refuse(self, status: int, message: str) -> None:
        self._answer(status, json.dumps({"error": {"code": status, "message": message}}).encode())

    def _answer(self, status: int, content: bytes = b"", generation: int = 0, headers: dict | None = None) -> None:
        if getattr(self, "silent", False):
            return
        self.send_response(status)
        for key, value in {"x-goog-generation": str(generation), **(headers or {})}.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.fault == "truncate" and len(content) > 1:
            self.wfile.write(content[: len(content) // 2])
            self.close_connection = True
        else:
            self.wfile.write(content)


class BucketServer(ThreadingHTTPServer):
    """Buckets at `url`; a process reads one as `gs://bucket/` with the environment `environment`."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.stored: dict[tuple[str, str], tuple[bytes, int]] = {}
        self.created: dict[tuple[str, str], str] = {}
        """When each was written."""
        self.uploads: dict[str, tuple[str, str, bytearray, str | None]] = {}
        self.regions = {"bucket": "US-EAST5"}
        self.worker_zone = ""
        """Zone of the pretended virtual machine, `us-east5-b`; empty for none."""
        self.machine: dict[str, str] = {}
        self.generation = 0
        self.lock = threading.RLock()
        self.faults = Faults()
        self.closed = threading.Event()
        """No request is left without an answer any more."""

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that went away is no news."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    @property
    def objects(self) -> dict[str, tuple[bytes, int]]:
        """Content and generation by name, of the bucket `bucket`."""
        with self.lock:
            return {name: value for (bucket, name), value in self.stored.items() if bucket == "bucket"}

    def put(self, bucket: str, name: str, content: bytes) -> None:
        with self.lock:
            self.generation += 1
            self.stored[bucket, name] = content, self.generation
            self.created[bucket, name] = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%dT%H:%M:%S.%f}"[:-3] + "Z"

    def remove(self, name: str) -> None:
        """Lose an object of the bucket `bucket`."""
        with self.lock:
            del self.stored["bucket", name]

    def metadata(self, key: tuple[str, str]) -> dict[str, str]:
        content, generation = self.stored[key]
        return {
            "kind": "storage#object", "name": key[1], "bucket": key[0], "size": str(len(content)),
            "crc32c": base64.b64encode(google_crc32c.Checksum(content).digest()).decode(),
            "md5Hash": base64.b64encode(hashlib.md5(content).digest()).decode(),
            "generation": str(generation), "metageneration": "1",
            "updated": self.created[key], "timeCreated": self.created[key],
            "mediaLink": f"{self.url}/download/storage/v1/b/{key[0]}/o/{urllib.parse.quote(key[1], safe='')}?alt=media",
        }  # fmt: skip

    @property
    def environment(self) -> dict[str, str]:
        urls = "TENSORSTORE_GCS_HTTP_URL", "STORAGE_EMULATOR_HOST", "CLOUD_STORAGE_EMULATOR_ENDPOINT"
        hosts = "GCE_METADATA_HOST", "GCE_METADATA_IP", "GCE_METADATA_ROOT"
        return dict.fromkeys(urls, self.url) | dict.fromkeys(hosts, self.url.removeprefix("http://"))


@contextmanager
def serve_bucket() -> Iterator[BucketServer]:
    """A server of its own thread: `gs://bucket/` for whoever has its `environment`."""
    with BucketServer() as server, ThreadPoolExecutor(1) as thread:
        thread.submit(server.serve_forever)
        try:
            yield server
        finally:
            server.closed.set()
            server.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description="An empty bucket gs://bucket in memory, for experiments.")
    parser.add_argument("--port", type=int, default=4443)
    parser.add_argument("--fault_share", type=float, default=0.0, help="part of the requests that fail")
    args = parser.parse_args()
    with BucketServer(args.port) as server:
        server.faults.share = args.fault_share
        print(*(f"export {key}={value}" for key, value in server.environment.items()), sep="\n", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()
