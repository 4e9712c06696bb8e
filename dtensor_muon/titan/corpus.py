"""Real text that every machine has: the sources and docstrings of the installed Python.

:func:`prepare` writes ``data.json`` (one ``{"text": ...}`` object a line) and a BPE tokenizer trained on it into one
folder, once. torchtitan knows the result as dataset "python_sources" with the folder as ``dataset_path`` and
``hf_assets_path``.
"""

import hashlib
import json
import os
import random
import shutil
import sysconfig
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datasets import Dataset

DATASET = "python_sources"
VOCAB_SIZE = 2048
MAX_BYTES = 800_000
MIN_BYTES = 300_000
PIECE_CHARS = 500
BEGIN, END = "<|begin_of_text|>", "<|end_of_text|>"

_DATA, _TOKENIZER, _TOKENIZER_CONFIG = "data.json", "tokenizer.json", "tokenizer_config.json"


def default_folder() -> Path:
    """Where the corpus goes unless a job names a folder: the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache, "dtensor_muon", DATASET)


def prepare(folder: str | os.PathLike[str] | None = None) -> Path:
    """Write the corpus and its tokenizer, unless they are there.

    The folder appears at once, by a rename: processes that prepare it at the same time do the work twice at worst.

    Args:
        folder: where to put them; None means :func:`default_folder`.

    Raises:
        FileNotFoundError: if the installed Python has (nearly) no sources.
        FileExistsError: if the folder exists with something else in it.
    """
    target = Path(folder) if folder is not None else default_folder()
    if is_prepared(target):
        return target
    if target.exists() and any(target.iterdir()):
        raise FileExistsError(
            f"{target} (training.dataset_path) exists but is not a prepared corpus: it lacks one of {_DATA}, "
            f"{_TOKENIZER}, {_TOKENIZER_CONFIG}. Remove it or name another folder"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        num_bytes = _write_texts(temporary / _DATA)
        print(f"[corpus] training a BPE tokenizer with {VOCAB_SIZE} tokens", flush=True)
        _write_tokenizer(temporary)
        temporary.chmod(0o755)
        _move_into_place(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    print(f"[corpus] ready: {num_bytes / 1e6:.1f} MB of Python sources and docstrings in {target}", flush=True)
    return target


def is_prepared(folder: Path) -> bool:
    """Whether a folder holds a corpus and its tokenizer."""
    return all((folder / name).is_file() for name in (_DATA, _TOKENIZER, _TOKENIZER_CONFIG))


def load(folder: str) -> "Dataset":
    """The prepared corpus as a dataset with a ``text`` column, prepared first if need be."""
    from datasets import Dataset

    with open(prepare(folder) / _DATA, encoding="utf-8") as lines:
        return Dataset.from_list([json.loads(line) for line in lines])


def _write_texts(path: Path) -> int:
    """Write up to :data:`MAX_BYTES` of sources as shuffled pieces, so that a batch mixes files; returns the bytes."""
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    pieces: list[str] = []
    total = shown = 0
    for text in _read_sources(stdlib):
        pieces.extend(_cut(text))
        total += len(text.encode())
        if total - shown >= MAX_BYTES // 4:
            shown = total
            print(f"[corpus] {total / 1e6:.1f} MB of Python sources collected from {stdlib}", flush=True)
        if total >= MAX_BYTES:
            break
    random.Random(0).shuffle(pieces)
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": piece}) + "\n" for piece in pieces)
    if total < MIN_BYTES:
        raise FileNotFoundError(
            f"only {total} bytes of Python sources in {stdlib}; training.dataset = {DATASET!r} needs {MIN_BYTES}. "
            "Install Python with its standard library, or set training.dataset to another dataset"
        )
    return total


def _cut(text: str) -> Iterator[str]:
    """Pieces of whole lines, of about :data:`PIECE_CHARS` characters."""
    piece = ""
    for line in text.splitlines(keepends=True):
        piece += line
        if len(piece) >= PIECE_CHARS:
            yield piece
            piece = ""
    if piece:
        yield piece


def _read_sources(stdlib: Path) -> Iterator[str]:
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    paths = (path.relative_to(stdlib) for path in stdlib.rglob("*.py"))
    wanted = (path for path in paths if not skipped.intersection(path.parts))
    for path in sorted(wanted, key=lambda path: hashlib.sha256(path.as_posix().encode()).digest()):
        try:
            yield (stdlib / path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            warnings.warn(f"{stdlib / path} is left out of the corpus: {error}", stacklevel=2)


def _write_tokenizer(folder: Path) -> None:
    """Train a byte-level BPE tokenizer on the corpus in ``folder`` and write torchtitan's two files beside it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[BEGIN, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    with (folder / _DATA).open(encoding="utf-8") as lines:
        tokenizer.train_from_iterator((json.loads(line)["text"] for line in lines), trainer)
    tokenizer.save(str(folder / _TOKENIZER))
    config = {"bos_token": BEGIN, "eos_token": END}
    (folder / _TOKENIZER_CONFIG).write_text(json.dumps(config), encoding="utf-8")


def _move_into_place(temporary: Path, target: Path) -> None:
    try:
        temporary.rename(target)
    except OSError:
        # another process was faster
        if not is_prepared(target):
            raise
