"""Re-tokenizing from a bucket into a bucket, with requests that fail, and training from what it wrote."""

import hashlib
import json
import os
import socket
import subprocess

import pytest
from tiny_run import DEMO, tiny_run, tomat

from tomat.base.layout import RETRY_STATUS
from tomat.data.density.demo.embedded import DATA_DIR, demo_materials

MATERIALS = 4
WORDS = ["--layout", "v3-p7", "--bins", "300", "--patches_per_material", "24", "--workers", "1", "--storage_tries", "5"]


def run(bucket, *words, status=0, timeout=120):
    """Run a verb in a process of its own: TensorStore and gcsfs read the address of the service once."""
    done = subprocess.run(
        tomat(*words),
        env={**os.environ, **bucket.environment, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done


@pytest.fixture
def densities(bucket):
    """Embedded densities as a `rho_gga` tree in the bucket."""
    for material in demo_materials("train")[:MATERIALS]:
        place = DATA_DIR / f"{material.material_id}.zarr"
        for path in place.rglob("*"):
            if path.is_file():
                bucket.put("bucket", f"rho_gga/label/{path.relative_to(DATA_DIR)}", path.read_bytes())
    return bucket


def digest(bucket, prefix):
    """Names and content of a set in the bucket, but for the place it came from."""
    objects = {name.removeprefix(prefix): content for name, (content, _) in bucket.objects.items() if prefix in name}
    return hashlib.sha256(repr(sorted(objects.items())).encode()).hexdigest()


@pytest.mark.slow
def test_faults_are_survived_without_a_wrong_byte(densities):
    bucket = densities
    run(bucket, "retokenize", "--input", "gs://bucket/rho_gga", "--output", "gs://bucket/calm", *WORDS)
    calm = bucket.requests.total()
    bucket.faults.share = 0.12
    run(bucket, "retokenize", "--input", "gs://bucket/rho_gga", "--output", "gs://bucket/rough", *WORDS)
    assert digest(bucket, "rough/") == digest(bucket, "calm/")
    faults = bucket.faults.counts
    assert calm > 50 and faults.total() >= 5 and len(faults) >= 3, faults
    # Reading back over the same unreliable service gives the same rows, or nothing.
    done = run(bucket, "shards", "verify", "gs://bucket/rough", "--sample", "8")
    assert "all 2 chunks (96 rows) are whole" in done.stdout and "8 rows" in done.stdout


@pytest.mark.slow
def test_truncated_object_is_one_skipped_material_and_a_lost_chunk_is_repaired(densities):
    bucket = densities
    name = next(name for name in bucket.objects if "/c/" in name and "charge_density_total" in name)
    content = bucket.objects[name][0]
    bucket.put("bucket", name, content[:-100])
    words = ["--input", "gs://bucket/rho_gga", "--output", "gs://bucket/set", *WORDS]
    error = run(bucket, "retokenize", *words, "--max_skipped", "0", status=2).stderr
    assert "1 of 4 materials would be skipped" in error and "does not decode" in error
    bucket.put("bucket", name, content)
    run(bucket, "retokenize", *words, "--max_skipped", "0")
    whole = digest(bucket, "set/")
    chunk = "set/tokens.zarr/c/1/0"
    bucket.put("bucket", chunk, bucket.objects[chunk][0][:-40])
    error = run(bucket, "shards", "verify", "gs://bucket/set", status=2).stderr
    assert "1 of 2 chunks are missing or damaged. The first: Chunk 1 of gs://bucket/set/" in error
    run(bucket, "shards", "verify", "gs://bucket/set", "--repair", "--sample", "4")
    assert digest(bucket, "set/") == whole


@pytest.mark.slow
def test_outage_ends_the_run_and_is_no_skipped_material(densities):
    bucket = densities
    bucket.faults.share = 1.0
    bucket.faults.kinds = ("503",)
    bucket.faults.only = lambda method, path: "charge_density_total%2Fc%2F" in path
    words = ["--input", "gs://bucket/rho_gga", "--output", "gs://bucket/set", *WORDS[:-2], "--storage_tries", "1"]
    error = run(bucket, "retokenize", *words, status=RETRY_STATUS, timeout=300).stderr
    assert "cannot be reached after 1 try" in error and "skipped" not in error
    bucket.faults.share = 0.0
    assert "0 materials skipped" in run(bucket, "retokenize", *words).stdout


def test_unreachable_bucket_is_one_error(bucket):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        environment = {
            key: value.replace(f"127.0.0.1:{bucket.server_address[1]}", address)
            for key, value in bucket.environment.items()
        }
        words = ["--source", "embedded", "--output", "gs://bucket/set", "--storage_tries", "2", "--workers", "1"]
        done = subprocess.run(
            tomat("retokenize", *words, "--allow_cross_region"),
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert done.returncode == RETRY_STATUS
    assert "error: Cannot read gs://bucket/set/request.json" in done.stderr and "Traceback" not in done.stderr


def test_bucket_that_does_not_exist_is_one_error(bucket):
    words = ["--source", "embedded", "--output", "gs://nowhere/set", "--storage_tries", "2", "--workers", "1"]
    error = run(bucket, "retokenize", *words, status=2).stderr
    assert "error: Cannot" in error and "gs://nowhere/set" in error and "Traceback" not in error


def test_other_region_needs_consent(densities):
    bucket = densities
    bucket.regions["elsewhere"] = "EUROPE-WEST4"
    bucket.worker_zone = "us-east5-b"
    words = ["--input", "gs://bucket/rho_gga", "--output", "gs://elsewhere/set", *WORDS]
    error = run(bucket, "retokenize", *words, status=2).stderr
    assert "input (gs://bucket/rho_gga) in us-east5, output (gs://elsewhere/set) in europe-west4" in error
    assert not [name for name, _ in bucket.stored if name == "elsewhere"]
    run(bucket, "retokenize", *words, "--allow_cross_region")
    assert ("elsewhere", "set/manifest.json") in bucket.stored


@pytest.mark.slow
def test_training_reads_the_set_in_the_bucket(tmp_path, densities):
    bucket = densities
    train, validation = "gs://bucket/train", "gs://bucket/validation"
    run(bucket, "retokenize", "--input", "gs://bucket/rho_gga", "--output", train, *WORDS)
    run(
        bucket,
        "retokenize",
        "--source",
        "embedded",
        "--split",
        "validation",
        "--output",
        validation,
        "--codec",
        f"{train}/codec.json",
        "--layout",
        "v3-p7",
        "--patches_per_material",
        "2",
        "--workers",
        "1",
        # The codec is that of rock salt: MgO is denser at its cores, which this test does not look at.
        "--max_clipped_share",
        "1",
    )
    words = ["--data.source", "shards", "--data.train", train, "--data.validation", validation]
    words += [*tiny_run(3, 3), "--data.layout", "v3-p7", "--data.n_density_tokens", 300]
    words += ["--data.shuffle.window_blocks", 2, "--output_dir", tmp_path, "--run_name", "bucket"]
    run(bucket, "train", "--config_path", DEMO, *words, timeout=400)
    rows = [json.loads(line) for line in (tmp_path / "bucket" / "metrics.jsonl").read_text().splitlines()]
    losses = [row["train/loss"] for row in rows if "train/loss" in row]
    assert len(losses) == 3 and all(loss > 0 for loss in losses)
