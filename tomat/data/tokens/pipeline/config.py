"""The configuration of re-tokenizing, from YAML and `--a.b value` overrides, and the shard set that it asks for."""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tomat.base.config_keys import check_range
from tomat.base.errors import TomatError
from tomat.base.overrides import COMMAND_LINE, parse_overrides, read_yaml, set_by, tomat_cause
from tomat.base.reporting import counted
from tomat.base.retries import STORAGE_TRIES
from tomat.data.codec.base import DensityCodec
from tomat.data.codec.files import codec_from_text
from tomat.data.codec.lloyd_max import Objective
from tomat.data.codec.relative import check_promolecule, relative_to
from tomat.data.codec.two_token import TwoTokenCodec
from tomat.data.density.elements import SYMBOLS
from tomat.data.density.io import text_at
from tomat.data.density.promolecule import Promolecule
from tomat.data.density.rules import ReadRules
from tomat.data.tokens.clipping import MAX_CLIPPED_SHARE, ClippedMaterial
from tomat.data.tokens.layouts import SequenceLayout, layout_named
from tomat.data.tokens.manifest import DEFAULT_BLOCK_ROWS, MaterialRows, ShardManifest, SkippedMaterial, anchors_seed
from tomat.data.tokens.vocabulary import DENSITY_START, MAX_IDS


@dataclass(frozen=True)
class RetokenizeConfig:
    """One shard set: which densities, cut how, written where."""

    input: str = ""
    """Folder or URL (`gs://`, `s3://`) of the densities; nothing for `source: embedded`."""
    output: str = ""
    source: Literal["rho_gga", "materials_project", "chgcar", "folder", "embedded"] = "rho_gga"
    """`rho_gga`: `<id>.zarr` groups; `materials_project`: `<id>.json.gz` objects; `chgcar`: a local folder of CHGCARs,
    at any depth; `folder`: densities of every kind, as other verbs find them (`data/density/io.py`);
    `embedded`: the densities that ship with tomat."""
    filelist: str | None = None
    """File with one material id per line (`mp_filelist.txt`): a path, a URL, or a name below `input`. None: all that
    `input` holds, in order of their names."""
    split_file: str | None = None
    """JSON with lists of indices into `filelist` by split (`split_limit_22M.json`); None: every material."""
    split: str = "train"
    """The split to take from `split_file` or the embedded data; recorded in the manifest."""
    layout: str = "v3-p19"
    """Sequence layout, `tomat/data/tokens/layouts.py`."""
    codec: str | None = None
    """Codec to use, a path or URL (`<training set>/codec.json`). None: fit one to these densities, or, for a layout of
    two tokens per voxel, take the 9 + 12 bit codec, which needs no fit."""
    promolecule: str | None = None
    """Promolecule to store beside the rows, a path or URL (`<training set>/promolecule.json`). None: one is fitted if
    the codec is fitted to these densities; otherwise there is none."""
    bins: int = 16_384
    """Bins of a fitted codec."""
    objective: Literal["absolute", "squared"] = "absolute"
    """Error that a fitted codec minimises."""
    relative: bool = False
    """Fit bins of the density's ratio to the sum of atoms (`tomat/data/codec/relative.py`). The densities are then read
    once more, after the promolecule is known."""
    patches_per_material: int = 64
    """Rows of each material, M; with scattered voxels no more than hold its cell."""
    seed: int = 0
    block_rows: int = DEFAULT_BLOCK_ROWS
    electron_tolerance: float = 0.005
    """Largest relative deviation of a density's integral from its electron count, and never more than 0.05 electrons;
    beyond it the material is skipped. With `accept: fractional_electrons` this applies only to a count that the source
    or `valences` state."""
    valences: dict[str, float] = field(default_factory=dict)
    """Valence electrons of each element (`ZVAL` of the POTCARs). If they have all elements of a material, they give its
    expected electron count. Otherwise the count must be a sum of valences that pseudopotentials in use leave the
    elements. The embedded densities come with their own counts."""
    max_clipped_share: float = MAX_CLIPPED_SHARE
    """Electrons that a material may lose because its voxels lie outside the codec, as a share of all; beyond it the
    material is skipped. The manifest counts smaller losses."""
    species: tuple[str, ...] = ()
    """Elements of CHGCARs that name none (VASP 4), in the order of their counts."""
    accept: tuple[str, ...] = ()
    """Refusals that are lifted, `tomat/data/density/rules.py`."""
    max_skipped: float = 0.01
    """Most skipped materials; with more the run fails. A number, or, below 1, a share of all."""
    storage_tries: int = STORAGE_TRIES
    """How often a request to a bucket is tried, with growing waits."""

    def __post_init__(self) -> None:
        layout_named(self.layout)
        ReadRules(self.species, self.accept)
        words = " ".join(self.species)
        if words and self.source not in ("chgcar", "folder"):
            raise TomatError(f"species is {words}, but the source '{self.source}' names its elements. Leave it out.")
        if self.accept and self.source == "embedded":
            raise TomatError(f"accept is {' '.join(self.accept)}; the embedded densities need none. Leave it out.")
        if not self.output:
            raise TomatError("There is no output; give a folder or gs:// URL with --output.")
        if bool(self.input) == (self.source == "embedded"):
            raise TomatError(
                f"The source is '{self.source}' and the input {self.input!r}; the embedded densities take no --input, "
                "every other source needs one."
            )
        if self.split_file is not None and self.filelist is None:
            raise TomatError("split_file is set, but filelist, which its indices count in, is not; set both.")
        check_range("", self, patches_per_material=1, block_rows=1, storage_tries=1, max_clipped_share=(0, 1))
        check_range("", self, bins=(2, MAX_IDS - DENSITY_START))
        # NaN fails every comparison, so each of these conditions states what is valid.
        if not 0 < self.electron_tolerance < 1:
            raise TomatError(f"electron_tolerance is {self.electron_tolerance}; expected a share between 0 and 1.")
        share, number = 0 <= self.max_skipped < 1, 1 <= self.max_skipped < math.inf
        if not share and not (number and self.max_skipped == int(self.max_skipped)):
            raise TomatError(f"max_skipped is {self.max_skipped}; expected a whole number, or a share of 0 to below 1.")
        _check_valences(self.valences)
        if self.promolecule is not None and self.sequence_layout.tokens_per_voxel > 1:
            raise TomatError(f"promolecule is {self.promolecule}; layout {self.layout} goes with none. Leave it out.")
        if self.relative and not self.fits_codec:
            given = f"codec is {self.codec}" if self.codec else f"layout {self.layout} takes no such codec"
            raise TomatError(f"relative is set, and {given}. Leave it out: a codec states its own bins.")
        if self.fits_codec and self.split not in ("train", ""):
            raise TomatError(
                f"The split is '{self.split}' and no codec is given. A codec is fitted to training data alone: give "
                "the training set's, --codec TRAINING_SET/codec.json."
            )

    @property
    def sequence_layout(self) -> SequenceLayout:
        return layout_named(self.layout)

    @property
    def fits_codec(self) -> bool:
        return self.codec is None and self.sequence_layout.tokens_per_voxel == 1

    @property
    def fits_promolecule(self) -> bool:
        return self.promolecule is None and self.fits_codec


def _check_valences(valences: Mapping[str, float]) -> None:
    """Refuse electrons that no pseudopotential of an element leaves."""
    for symbol, electrons in valences.items():
        if symbol not in SYMBOLS:
            quoted = "; write 'No' with quotes: YAML reads it as a truth value" if symbol in ("False", "no") else ""
            raise TomatError(f"valences has {symbol!r}; expected symbols of elements, such as {{Si: 4}}{quoted}.")
        atomic_number = SYMBOLS.index(symbol) + 1
        # One more than the neutral atom has: VASP's fractional hydrogens go up to H1.75.
        if not 0 < electrons <= atomic_number + 1:
            most = f"at most about its {counted(atomic_number, 'electron')} (ZVAL of its POTCAR)"
            raise TomatError(f"valences says {electrons} electrons for {symbol}; expected a number above 0, {most}.")


def load_retokenize_config(
    config_path: str | Path | None, overrides: Sequence[str] = (), flags: Mapping[str, Any] | None = None
) -> RetokenizeConfig:
    """Read a YAML file (None: the defaults). Words of a command line override it, and flags that are not None both."""
    import draccus
    from draccus.utils import DecodingError

    values = {} if config_path is None else read_yaml(config_path, "tokenize")
    over = parse_overrides(overrides) | {key: value for key, value in (flags or {}).items() if value is not None}
    values |= over
    # draccus would take `true` for 1, and null for a number.
    numbers = {each.name for each in dataclasses.fields(RetokenizeConfig) if each.type in (int, float)}
    given = {key: value for key, value in values.items() if key in numbers}
    if isinstance(valences := values.get("valences"), Mapping):
        given |= {f"valences of {symbol}": electrons for symbol, electrons in valences.items()}
    if bad := next((key for key, value in given.items() if value is None or isinstance(value, bool)), None):
        raise TomatError(f"{bad} is {given[bad]}; expected a number.")
    try:
        return draccus.decode(RetokenizeConfig, values)
    except Exception as error:  # draccus wraps what a dataclass raises, by version and by depth, in several classes
        if (cause := tomat_cause(error)) is not None:
            raise cause from None
        source = str(config_path or "The configuration")
        if isinstance(error, DecodingError):
            source = set_by(error.key_path, source, over, COMMAND_LINE)
        raise TomatError(f"{source} cannot be read: {' '.join(str(error).split())}") from error


@dataclass(frozen=True, kw_only=True)
class ShardJob:
    """A shard set to write, as every worker needs it."""

    output: str
    layout: SequenceLayout
    codec: DensityCodec | None
    """None: one is fitted to the densities."""
    promolecule: Promolecule | None = None
    """A given promolecule, which is stored beside the rows."""
    fits_promolecule: bool = False
    bins: int = 0
    objective: Objective = "absolute"
    relative: bool = False
    """Whether a fitted codec is relative to the promolecule."""
    patches_per_material: int
    seed: int
    split: str = ""
    block_rows: int = DEFAULT_BLOCK_ROWS
    max_clipped_share: float = MAX_CLIPPED_SHARE
    """A material that loses more of its electrons outside the codec is skipped."""
    read_rules: Mapping[str, Sequence[str]] | None = None
    """What is assumed of the densities; None: not recorded in the manifest."""
    electron_tolerance: float | None = None
    """Largest relative deviation of an electron count; None: the reader of the densities has compared the counts."""
    valences: Mapping[str, float] = field(default_factory=dict)
    accept: tuple[str, ...] = ()
    storage_tries: int = STORAGE_TRIES

    def __post_init__(self) -> None:
        check_range("", self, patches_per_material=1, block_rows=1, max_clipped_share=(0, 1))
        # The promolecule of a relative codec is stored beside the rows, so that their readers need no other.
        if self.codec is not None and (own := relative_to(self.codec)) is not None:
            if self.promolecule is None:
                object.__setattr__(self, "promolecule", own)
            check_promolecule(self.codec, self.promolecule, "The shard set to write")

    @property
    def counts_densities(self) -> bool:
        """Whether the survey counts densities for a codec; ratios are counted once there is a promolecule."""
        return self.codec is None and not self.relative

    @classmethod
    def of(cls, config: RetokenizeConfig) -> "ShardJob":
        """The job of a configuration, with the codec and the promolecule that it names."""
        codec = promolecule = None
        if config.codec is not None:
            codec = codec_from_text(text_at(config.codec, config.storage_tries), config.codec)
        elif not config.fits_codec:
            codec = TwoTokenCodec()
        if config.promolecule is not None:
            promolecule = Promolecule.from_text(text_at(config.promolecule, config.storage_tries), config.promolecule)
        named = {"layout": config.sequence_layout, "codec": codec, "promolecule": promolecule}
        names = {each.name for each in dataclasses.fields(cls)} - named.keys() - {"read_rules"}
        return cls(**named, **{name: getattr(config, name) for name in names})

    def plan(
        self,
        materials: Iterable[tuple[str, Sequence[int]]],
        codec: DensityCodec,
        *,
        skipped: Sequence[SkippedMaterial] = (),
        clipped: Iterable[ClippedMaterial] | None = None,
        structures_sha256: str | None = None,
        promolecule_sha256: str | None = None,
    ) -> ShardManifest:
        """Lay out the rows of materials, given by name and grid shape. Returns a manifest that is not complete and has
        no checksums. `clipped` None: the voxels outside the codec were not counted."""
        entries: list[MaterialRows] = []
        rows = 0
        for name, (nx, ny, nz) in materials:
            shape = int(nx), int(ny), int(nz)
            end = rows + self.layout.material_rows(self.patches_per_material, shape)
            entries.append(MaterialRows(name, rows, end, anchors_seed(self.seed, name), shape))
            rows = end
        names = Counter(entry.material_id for entry in (*entries, *skipped))
        if twice := next((name for name, times in names.items() if times > 1), None):
            raise TomatError(f"Material {twice} is named twice; name each material once.")
        if not entries:
            were = f"{counted(len(skipped), 'material')} {'was' if len(skipped) == 1 else 'were'} skipped"
            first = f" The first reason: {skipped[0].material_id}: {skipped[0].reason}" if skipped else ""
            raise TomatError(f"There is nothing to tokenize: {were}, none is left.{first}")
        rules = self.read_rules
        return ShardManifest(
            split=self.split,
            layout=self.layout,
            rows=rows,
            block_rows=self.block_rows,
            codec_sha256=codec.sha256,
            n_density_tokens=codec.n_density_tokens,
            unit=codec.unit,
            patches_per_material=self.patches_per_material,
            seed=self.seed,
            materials=tuple(entries),
            skipped=tuple(skipped),
            clipped=None if clipped is None else tuple(clipped),
            max_clipped_share=self.max_clipped_share,
            read_rules=None if rules is None else {key: tuple(names) for key, names in rules.items()},
            structures_sha256=structures_sha256,
            promolecule_sha256=promolecule_sha256,
        )
