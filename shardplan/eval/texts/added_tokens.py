"""Adds the tokens that files beside a tokenizer.json define, in the order of transformers.

`tokenizer_config.json` lists them under `added_tokens_decoder`; older checkpoints have `added_tokens.json` and
`special_tokens_map.json` instead. Named tokens, such as that of the beginning, are added where nothing else has them.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from tokenizers import AddedToken, Tokenizer

from shardplan.errors import CheckpointError, one_line
from shardplan.storage import Folder, read_bytes

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Keys whose value is one token."""
LISTED_TOKENS = ("additional_special_tokens", "extra_special_tokens")
"""Keys whose value is a list of tokens."""
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
"""Flags that say how an added token is found in a text."""


def with_added_tokens(data: bytes, folder: Folder) -> bytes:
    """Return tokenizer.json with the tokens that other files of the folder add; unchanged without such tokens.

    Raises:
        CheckpointError: a file is damaged, or lists a token with another id than the tokenizer gives it.
    """
    config, names, added = (
        _read_json(folder, name) for name in ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
    )
    try:
        tokenizer = Tokenizer.from_buffer(data)
        listed = list(_listed_tokens(config, names, added))
        # tokens of one text are equal whatever their flags; their representations are not
        known = {repr(token) for token in tokenizer.get_added_tokens_decoder().values()}
        missing: list[tuple[int | None, AddedToken]] = []
        for number, token in listed:
            if repr(token) not in known:
                missing.append((number, token))
        contents = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
        contents.update(token.content for _, token in listed)
        specials = config if "added_tokens_decoder" in config else {**config, **names}
        for token in _special_tokens(specials):
            if token.content not in contents:
                contents.add(token.content)
                missing.append((None, token))
        if not missing:
            return data
        tokenizer.add_tokens([token for _, token in missing])
    except Exception as error:  # tokenizers raises bare Exception, and entries may be of any form
        raise CheckpointError(
            f"{folder.ref}: the tokens that tokenizer_config.json adds to tokenizer.json are damaged: {one_line(error)}"
        ) from error
    for expected, token in missing:
        given = tokenizer.token_to_id(token.content)
        if expected is not None and given != expected:
            raise CheckpointError(
                f"{folder.ref}: tokenizer_config.json gives {token.content!r} the id {expected}, and behind the tokens "
                f"of tokenizer.json it is {given}; save the tokenizer anew with transformers"
            )
    return tokenizer.to_str().encode()


def _read_json(folder: Folder, name: str) -> dict[str, Any]:
    """Return the content of a JSON file, empty if it does not exist."""
    data = read_bytes(folder, name)
    try:
        loaded = {} if data is None else json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{folder.ref}/{name} is not JSON: {one_line(error)}") from error
    if not isinstance(loaded, dict):
        raise CheckpointError(f"{folder.ref}/{name} holds no keys")
    return loaded


def _listed_tokens(
    config: Mapping[str, Any], names: Mapping[str, Any], added: Mapping[str, Any]
) -> Iterator[tuple[int, AddedToken]]:
    """Yield (id, token) for every token that is listed with its id, in the order of ids."""
    if "added_tokens_decoder" in config:
        for number, entry in sorted(config["added_tokens_decoder"].items(), key=lambda item: int(item[0])):
            yield int(number), _make_token(entry)
        return
    special = {token.content for token in _special_tokens({**config, **names})}
    for content, number in sorted(added.items(), key=lambda item: int(item[1])):
        is_special = content in special
        yield int(number), AddedToken(content, normalized=not is_special, special=is_special)


def _special_tokens(values: Mapping[str, Any]) -> Iterator[AddedToken]:
    """Yield every token that a key defines."""
    for key in NAMED_TOKENS:
        if values.get(key):
            yield _make_token(values[key], special=True)
    for key in LISTED_TOKENS:
        listed = values.get(key) or ()
        for entry in listed.values() if isinstance(listed, dict) else listed:
            yield _make_token(entry, special=True)


def _make_token(entry: Any, special: bool | None = None) -> AddedToken:
    """Make a token from its text, or from its text and flags."""
    if isinstance(entry, str):
        return AddedToken(entry, special=bool(special))
    flags = {key: entry[key] for key in FLAGS if key in entry}
    return AddedToken(entry["content"], **{**flags, **({} if special is None else {"special": special})})
