"""Re-tokenizing from a bucket into a bucket, with requests that fail."""

import os
import socket
import tempfile

import pytest
from forked import Forked

from tomat.base.layout import RETRY_STATUS
from tomat.data.density.demo.embedded import demo_materials, load_stored
from tomat.data.density.outputs import write_density

MATERIALS = 4
WORDS = ["--layout", "v3-p7", "--bins", "300", "--patches_per_material", "24", "--workers", "1", "--storage_tries", "5"]
FROM_BUCKET = ["retokenize", "--input", "gs://bucket/rho_gga", *WORDS, "--output"]


STOPPED = """
import sys
from tomat.data.tokens.writer import ChunkWriter

write = ChunkWriter.write

def stop_at_the_second(self, chunk, rows):
    if chunk:
        sys.exit(3)
    write(self, chunk, rows)

ChunkWriter.write = stop_at_the_second
"""


def run(environment, *words, status=0, before=""):
    """Run a verb in a process of its own: TensorStore and gcsfs read the address of the service once."""
    with tempfile.TemporaryFile() as errors:
        process = Forked(*words, env={**os.environ, **environment}, before=before, errors=errors)
        said, _ = process.communicate(timeout=400)
        errors.seek(0)
        told = errors.read().decode().partition("nanobind: ")[0]  # of modules that the server has imported
    assert process.returncode == status, said + told
    assert "Traceback" not in told
    return told if status else said


@pytest.fixture
def densities(bucket, tmp_path):
    """Embedded densities as a `rho_gga` tree in the bucket."""
    for material in demo_materials("train")[:MATERIALS]:
        write_density(load_stored(material.material_id), tmp_path / f"{material.material_id}.zarr", "zarr")
        for path in (tmp_path / f"{material.material_id}.zarr").rglob("*"):
            if path.is_file():
                bucket.put("bucket", f"rho_gga/label/{path.relative_to(tmp_path)}", path.read_bytes())
    return bucket


@pytest.mark.slow
def test_an_outage_skips_no_material(densities):
    bucket, environment = densities, densities.environment
    bucket.faults.share, bucket.faults.kinds = 1.0, ("503",)
    bucket.faults.only = lambda method, path: "charge_density_total%2Fc%2F" in path
    error = run(environment, *FROM_BUCKET, "gs://bucket/set", "--storage_tries", "1", status=RETRY_STATUS)
    assert "cannot be reached after 1 try" in error and "skipped" not in error


@pytest.mark.slow
def test_a_set_in_another_region_with_faults_and_a_lost_chunk_is_that_of_a_folder(tmp_path, densities):
    bucket, environment = densities, densities.environment
    bucket.regions["elsewhere"] = "EUROPE-WEST4"
    bucket.worker_zone = "us-east5-b"
    error = run(environment, *FROM_BUCKET, "gs://elsewhere/set", status=2)
    assert "input (gs://bucket/rho_gga) in us-east5, output (gs://elsewhere/set) in europe-west4" in error
    assert not [name for name, _ in bucket.stored if name == "elsewhere"]
    # Stopped in the middle of the chunks, and started again, with faults.
    words = [*FROM_BUCKET, "gs://elsewhere/set", "--allow_cross_region"]
    run(environment, *words, status=3, before=STOPPED)
    assert [name for at, name in bucket.stored if at == "elsewhere" and "/progress/" in name]
    bucket.faults.share = 0.12
    run(environment, *words)
    faults = bucket.faults.counts
    assert faults.total() >= 5 and len(faults) >= 3, faults
    # The objects are the files of a set in a folder.
    run(environment, *FROM_BUCKET, tmp_path / "set", "--allow_cross_region")
    paths = [path for path in (tmp_path / "set").rglob("*") if path.is_file()]
    files = {f"set/{path.relative_to(tmp_path / 'set')}": path.read_bytes() for path in paths}

    def stored():
        return {name: content for (at, name), (content, _) in bucket.stored.items() if at == "elsewhere"}

    assert stored() == files
    chunk = "set/tokens.zarr/c/1/0"
    bucket.put("elsewhere", chunk, files[chunk][:-40])
    repaired = run(environment, "shards", "verify", "gs://elsewhere/set", "--repair", "--sample", "8")
    assert "repaired chunk 1" in repaired and "8 rows" in repaired and stored() == files


def test_bucket_that_cannot_be_reached_or_does_not_exist_is_one_error(bucket):
    words = ["retokenize", "--source", "embedded", "--storage_tries", "2", "--workers", "1", "--allow_cross_region"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        old, new = (f"127.0.0.1:{address[1]}" for address in (bucket.server_address, free.getsockname()))
        environment = {key: value.replace(old, new) for key, value in bucket.environment.items()}
        error = run(environment, *words, "--output", "gs://bucket/set", status=RETRY_STATUS)
    assert "error: gs://bucket/set/ cannot be reached" in error and new in error
    error = run(bucket.environment, *words, "--output", "gs://nowhere/set", status=2)
    assert "error: Cannot" in error and "gs://nowhere/set" in error
