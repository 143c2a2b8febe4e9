"""Folders of weights on the Hugging Face hub, through `huggingface_hub`, which is installed with Levanter."""

import json
import re
from pathlib import Path

from tomat.base.errors import TomatError
from tomat.base.layout import CODEC_FILE, CONFIG_FILE, PAGE_FILE, PROMOLECULE_FILE
from tomat.base.reporting import first_line
from tomat.predict.weights.record import ARRAYS_FILE, WEIGHTS_FILE, is_weights_folder, read_weights_record

FILES = (ARRAYS_FILE, WEIGHTS_FILE, CONFIG_FILE, CODEC_FILE, PROMOLECULE_FILE, PAGE_FILE)
"""The only files that are fetched."""
ADDRESS = re.compile(r"hf://([\w.-]+/[\w.-]+)(?:@([\w./-]+))?")
LICENCES = ("apache-2.0", "mit", "bsd-3-clause", "cc0-1.0", "cc-by-4.0", "cc-by-sa-4.0", "cc-by-nc-4.0")
"""Licences in use for weights that the hub has names for (huggingface.co/docs/hub/repositories-licenses)."""


def hub_folder(place: str) -> Path:
    """The local copy of `hf://ORG/NAME`, or of its revision `hf://ORG/NAME@REVISION`. It is fetched; without a network,
    the copy of an earlier fetch is used. A folder whose files have no hashes is refused."""
    found = ADDRESS.fullmatch(place)
    if found is None:
        raise TomatError(f"{place} is no model of the hub; expected hf://ORG/NAME or hf://ORG/NAME@REVISION.")
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        said = f"{place} needs huggingface_hub, which is not installed"
        raise TomatError(f"{said}: `pip install huggingface_hub`, or give a local folder.") from None
    try:
        folder = Path(snapshot_download(found[1], revision=found[2], allow_patterns=list(FILES)))
    except (OSError, ValueError) as error:
        check = "Is there a network here, is the name right, and is it public (else `hf auth login`)?"
        raise TomatError(f"{place} cannot be fetched: {first_line(error).rstrip('.')}. {check}") from error
    write = "expected a folder that `tomat export --format huggingface` wrote, with the SHA-256 of each file"
    if not is_weights_folder(folder):
        raise TomatError(f"{place} has no {WEIGHTS_FILE}; {write}.")
    hashed = read_weights_record(folder).sha256
    for name in FILES:
        if name not in (WEIGHTS_FILE, PAGE_FILE, *hashed) and (folder / name).exists():
            raise TomatError(f"{place} has a {name} without a hash in {WEIGHTS_FILE}; {write}.")
    return folder


def front_matter(licence: str | None) -> str:
    """The head of a model card, which the hub reads."""
    lines = ["library_name: tomat", "tags: [electron-density, crystals, dft, materials-science, safetensors]"]
    if licence is not None:
        known = licence.lower() in LICENCES
        lines += (
            [f"license: {licence.lower()}"] if known else ["license: other", f"license_name: {json.dumps(licence)}"]
        )
    return "\n".join(["---", *lines, "---", "", ""])
