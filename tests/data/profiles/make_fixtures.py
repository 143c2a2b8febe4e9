"""Makes the profile fixtures beside it: run by hand, with `cpu`, `tpu` or `gpu FILE`; the tests only read the results.

`cpu_step.xplane.pb.gz`: a real trace of six steps of a small Levanter decoder on two CPU devices, taken here.
`v6e_step.hlo.pb.gz`: the optimised HLO of a small Levanter decoder's train step, really compiled for a TPU v6e 2x2
slice by libtpu on a machine without a TPU (`tpu` needs the `plan` extra). The bodies of its Pallas kernels are cut out
to keep it small. No TPU ever ran it: the tests give its kernels durations and build a trace of them field by field.
`h200_step.xplane.pb.gz`: the first four of eight steps of `configs/sweeps/lab-gpu.yaml`'s `one ahead`, taken on an
NVIDIA H200 with jax 0.11.2 on 2026-11-26 by `trainer.profiler`; of the host what launched them.

Absolute paths of the machine that made them are shortened in all.
"""

import gzip
import json
import os
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
CPU_FIXTURE = HERE / "cpu_step.xplane.pb.gz"
TPU_FIXTURE = HERE / "v6e_step.hlo.pb.gz"
GPU_FIXTURE = HERE / "h200_step.xplane.pb.gz"
GPU_STEPS = 4
GPU_STATS = {"hlo_op", "hlo_module", "program_id", "correlation_id", "tf_op", "step_num", "module_name"}
GPU_HOST_EVENTS = ("train", "GpuExecutable::ExecuteThunks", "cuGraphLaunch", "cuLaunchKernel", "Memcpy", "Memset")


def build_step(config, vocab_size: int, batch: int, length: int):
    """(init, train_step, Batch, Position) of a decoder with cross-entropy and AdamW, as plain functions."""
    import equinox as eqx
    import haliax as hax
    import jax
    import jax.numpy as jnp
    import jmp
    import optax
    from levanter.layers.attention import AttentionMask

    vocab = hax.Axis("vocab", vocab_size)
    policy = jmp.get_policy("p=f32,c=bfloat16")
    optimizer = optax.adamw(1e-3)
    compute_axes = {"batch": "data"}

    def init(key):
        model = config.build(vocab, key=key)
        return model, optimizer.init(eqx.filter(model, eqx.is_array))

    def train_step(state, tokens):
        model, optimizer_state = state

        def loss_fn(model):
            model = policy.cast_to_compute(model)
            hidden = model.activations(tokens, AttentionMask.causal())
            hidden = hidden[0] if isinstance(hidden, tuple) else hidden
            with jax.named_scope("loss"):
                logits = hax.dot(hidden, model.get_lm_head(), axis="embed").astype(jnp.float32)
                log_probability = hax.nn.log_softmax(hax.shard(logits), "vocab")
                target = hax.nn.one_hot(hax.roll(tokens, -1, "position"), vocab, dtype=jnp.float32)
                return -hax.mean(hax.sum(log_probability * target, "vocab")).array

        with hax.axis_mapping(compute_axes):
            loss, gradient = eqx.filter_value_and_grad(loss_fn)(model)
            updates, optimizer_state = optimizer.update(gradient, optimizer_state, eqx.filter(model, eqx.is_array))
            model = eqx.apply_updates(model, updates)
        return (model, optimizer_state), loss

    return init, train_step, hax.Axis("batch", batch), hax.Axis("position", length)


def make_tpu() -> None:
    """Compile for v6e:2x2 with the weights sharded over `embed`, as Levanter does by default."""
    os.environ |= {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v6e-4",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }
    import equinox as eqx
    import haliax as hax
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec
    from levanter.layers.attention import AttentionBackend
    from levanter.layers.rotary import Llama3RotaryEmbeddingsConfig
    from levanter.models.qwen import Qwen3Config

    devices = topologies.get_topology_desc(platform="tpu", topology_name="v6e:2x2").devices
    mesh = Mesh(np.array(devices), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    config = Qwen3Config(
        max_seq_len=1024, hidden_dim=256, intermediate_dim=1024, num_layers=4, num_heads=2, num_kv_heads=2,
        head_dim=128, tie_word_embeddings=True, rope=Llama3RotaryEmbeddingsConfig(),
        attn_backend=AttentionBackend.SPLASH, gradient_checkpointing=True, flash_attention_block_size=512,
    )  # fmt: skip
    init, train_step, batch, position = build_step(config, vocab_size=4096, batch=8, length=1024)

    def abstract(leaf):
        if isinstance(leaf, hax.NamedArray):
            spec = hax.partitioning.pspec_for_axis(leaf.axes, {"embed": "data"})
            sharding = NamedSharding(mesh, spec)
            return hax.NamedArray(
                jax.ShapeDtypeStruct(leaf.array.shape, leaf.array.dtype, sharding=sharding), leaf.axes
            )
        if hasattr(leaf, "shape"):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, PartitionSpec()))
        return leaf

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        shapes = eqx.filter_eval_shape(init, jax.random.key(0))
        state = jax.tree.map(abstract, shapes, is_leaf=lambda leaf: isinstance(leaf, hax.NamedArray))
        arrays, static = eqx.partition(state, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
        token_sharding = NamedSharding(mesh, PartitionSpec("data", None))
        tokens = hax.NamedArray(jax.ShapeDtypeStruct((8, 1024), jnp.int32, sharding=token_sharding), (batch, position))

        def step(arrays, tokens):
            new_state, loss = train_step(eqx.combine(arrays, static), tokens)
            return eqx.filter(new_state, eqx.is_array), loss

        compiled = jax.jit(step, donate_argnums=(0,)).lower(arrays, tokens).compile()

    from tomat.profile.protos import new_message

    proto = new_message("HloProto")
    proto.hlo_module.ParseFromString(compiled.runtime_executable().hlo_modules()[0].as_serialized_hlo_module_proto())
    shorten_paths(proto.hlo_module)
    for computation in proto.hlo_module.computations:
        for instruction in computation.instructions:
            if instruction.custom_call_target == "tpu_custom_call":
                settings = json.loads(instruction.backend_config)
                settings["custom_call_config"]["body"] = ""
                instruction.backend_config = json.dumps(settings, sort_keys=True).encode()
    write(TPU_FIXTURE, proto.SerializeToString(deterministic=True))
    print("XLA counts, loop bodies once:", {k: compiled.cost_analysis()[k] for k in ("flops", "bytes accessed")})


def make_cpu() -> None:
    """Six steps on two CPU devices, batch sharded, with vanilla attention."""
    os.environ |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    import equinox as eqx
    import haliax as hax
    import jax
    from jax.sharding import NamedSharding, PartitionSpec
    from levanter.layers.attention import AttentionBackend
    from levanter.models.qwen import Qwen3Config

    config = Qwen3Config(
        max_seq_len=64, hidden_dim=64, intermediate_dim=128, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=32,
        tie_word_embeddings=True, attn_backend=AttentionBackend.VANILLA, gradient_checkpointing=True,
    )  # fmt: skip
    init, train_step, batch, position = build_step(config, vocab_size=128, batch=4, length=64)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    with mesh, tempfile.TemporaryDirectory() as scratch:
        state = jax.device_put(eqx.filter(init(jax.random.key(0)), eqx.is_array), NamedSharding(mesh, PartitionSpec()))
        static = eqx.filter(init(jax.random.key(0)), eqx.is_array, inverse=True)
        sharding = NamedSharding(mesh, PartitionSpec("data", None))
        drawn = jax.device_put(jax.random.randint(jax.random.key(1), (4, 64), 0, 128), sharding)
        tokens = hax.NamedArray(drawn, (batch, position))

        @jax.jit
        def step(arrays, tokens):
            new_state, loss = train_step(eqx.combine(arrays, static), tokens)
            return eqx.filter(new_state, eqx.is_array), loss

        state, loss = step(state, tokens)
        jax.block_until_ready(state)
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level, options.host_tracer_level, options.enable_hlo_proto = 0, 2, True
        with jax.profiler.trace(scratch, profiler_options=options):
            for number in range(6):
                with jax.profiler.StepTraceAnnotation("train", step_num=number):
                    state, loss = step(state, tokens)
                    jax.block_until_ready((state, loss))
        (file,) = Path(scratch).rglob("*.xplane.pb")
        write(CPU_FIXTURE, scrub_trace(file.read_bytes()))


def make_gpu(trace: str) -> None:
    """Cut the trace of a run on a GPU."""
    from tomat.profile.protos import new_message

    space = new_message("XSpace")
    space.ParseFromString(Path(trace).read_bytes())
    for plane in [p for p in space.planes if p.name not in ("/device:GPU:0", "/host:CPU", "/host:metadata")]:
        space.planes.remove(plane)
    host = next(plane for plane in space.planes if plane.name == "/host:CPU")
    labels = {key: value.name for key, value in host.event_metadata.items()}
    marks = [(line, event) for line in host.lines for event in line.events if labels[event.metadata_id] == "train"]
    end_ps = sorted(1000 * line.timestamp_ns + event.offset_ps for line, event in marks)[GPU_STEPS]
    for plane in space.planes:
        names = {key: value.name for key, value in plane.stat_metadata.items()}
        labels = {key: value.name for key, value in plane.event_metadata.items()}
        for line in list(plane.lines):
            for event in list(line.events):
                wanted = plane is not host or any(part in labels[event.metadata_id] for part in GPU_HOST_EVENTS)
                if not wanted or 1000 * line.timestamp_ns + event.offset_ps >= end_ps:
                    line.events.remove(event)
                    continue
                for stat in [stat for stat in event.stats if names[stat.metadata_id] not in GPU_STATS]:
                    event.stats.remove(stat)
            if plane is host and not any("ExecuteThunks" in labels[event.metadata_id] for event in line.events):
                plane.lines.remove(line)
        if plane.name == "/host:metadata":
            continue
        events = [event for line in plane.lines for event in line.events]
        stats = [stat for owner in [plane, *events] for stat in owner.stats]
        used = {stat.metadata_id for stat in stats} | {stat.ref_value for stat in stats}
        for table, kept in ((plane.event_metadata, {e.metadata_id for e in events}), (plane.stat_metadata, used)):
            for key in set(table) - kept:
                del table[key]
    write(GPU_FIXTURE, scrub_trace(space.SerializeToString(), "jit__train_step"))


def scrub_trace(data: bytes, program: str = "jit_step") -> bytes:
    """Keep the program that ran, shorten its paths, and forget the machine's name."""
    from tomat.profile.protos import new_message

    space = new_message("XSpace")
    space.ParseFromString(data)
    del space.hostnames[:]
    space.hostnames.append("host0")
    for plane in space.planes:
        names = {key: value.name for key, value in plane.stat_metadata.items()}
        for key, metadata in list(plane.event_metadata.items()):
            for stat in metadata.stats:
                if names.get(stat.metadata_id) != "Hlo Proto":
                    continue
                if not metadata.name.startswith(program):
                    del plane.event_metadata[key]
                    break
                proto = new_message("HloProto")
                proto.ParseFromString(stat.bytes_value)
                shorten_paths(proto.hlo_module)
                stat.bytes_value = proto.SerializeToString(deterministic=True)
    return space.SerializeToString(deterministic=True)


def shorten_paths(module) -> None:
    """`/.../site-packages/levanter/x.py` -> `site-packages/levanter/x.py`; the step's own file -> its name."""

    def short(path: str) -> str:
        for root in ("/site-packages/", "/site/"):  # the latter on the machine with the GPU
            if root in path:
                return "site-packages/" + path.split(root, 1)[1]
        return "tomat/" + path.split("/tomat/", 1)[1] if "/tomat/" in path else Path(path).name

    names = [short(path) for path in module.stack_frame_index.file_names]
    del module.stack_frame_index.file_names[:]
    module.stack_frame_index.file_names.extend(names)
    for computation in module.computations:
        for instruction in computation.instructions:
            if instruction.metadata.source_file:
                instruction.metadata.source_file = short(instruction.metadata.source_file)


def write(path: Path, data: bytes) -> None:
    """Gzip without a time stamp."""
    path.write_bytes(gzip.compress(data, 9, mtime=0))
    print(f"{path.name}: {len(data):,} bytes, {path.stat().st_size:,} compressed")


if __name__ == "__main__":
    {"cpu": make_cpu, "tpu": make_tpu, "gpu": make_gpu}[sys.argv[1]](*sys.argv[2:])
