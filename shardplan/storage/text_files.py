"""The files that hold texts, recognised by their endings."""

from pathlib import Path

from shardplan.errors import ConfigError, missing_path
from shardplan.storage import File, open_folder
from shardplan.storage.listing import list_files

PLAIN_TEXT, JSON_LINES, PARQUET = (".txt",), (".jsonl", ".jsonl.gz", ".jsonl.zst"), (".parquet",)
ENDINGS = (*PLAIN_TEXT, *JSON_LINES, *PARQUET)
"""Endings of the files that can be read; case does not matter."""


def open_text_files(path: str) -> list[tuple[str, File]]:
    """Open the file that `path` names, or the folder's files with known endings; return name and file of each.

    Raises:
        ConfigError: the file or folder does not exist, or the folder has no texts, or a link to a missing file.
        CheckpointError: a file exists and cannot be opened.
    """
    folder_ref, _, name = path.rpartition("/")
    if path.lower().endswith(ENDINGS):
        if "://" not in path and not Path(path).is_file():
            texts = (str(file) for file in Path(path).parent.glob("*") if file.name.lower().endswith(ENDINGS))
            raise ConfigError(f"data.path {path} {missing_path(path, texts)}")
        file = open_folder(folder_ref or (str(Path(path).parent))).open(name)
        if file is None:
            raise ConfigError(f"data.path {path} does not exist")
        return [(name, file)]
    if "://" not in path and not Path(path).is_dir():
        if not Path(path).exists():
            siblings = Path(path).parent.glob("*")
            others = [str(each) for each in siblings if each.is_dir() or each.name.lower().endswith(ENDINGS)]
            raise ConfigError(f"data.path {path} {missing_path(path, others)}")
        raise ConfigError(
            f"data.path {path} ends in none of {', '.join(ENDINGS)}; name a file with one of these endings, or a "
            "folder of them"
        )
    links = [] if "://" in path else [each.name for each in sorted(Path(path).iterdir()) if not each.exists()]
    broken = [link for link in links if link.lower().endswith(ENDINGS)]
    if broken:
        raise ConfigError(
            f"data.path {path} holds {broken[0]}, a link to a file that does not exist; repair or remove it"
        )
    folder = open_folder(path)
    names = [name for name in list_files(path) if name.lower().endswith(ENDINGS)]
    files = [(name, file) for name in names if (file := folder.open(name)) is not None]
    if not files:
        raise ConfigError(f"data.path {path} holds no file that ends in one of {', '.join(ENDINGS)}")
    return files
