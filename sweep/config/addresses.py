"""Addresses of stores without their secrets: everything that is composed, stored or printed has *** in their place.

Whoever opens a store gets the whole address back (`reveal`), in this process and in those that it starts.
"""

from __future__ import annotations

import json
import os
import re
import urllib.parse
from collections.abc import Mapping
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from sweep.config.schema import encode

MASK = "***"
#: What tells masked addresses apart from what they stand for: an environment variable, so that child processes have it.
ENVIRONMENT = "SWEEP_STORE_ADDRESSES"
#: Keys whose values are addresses of stores, or hold some.
KEYS = ("tracking.uri", "hydra.sweeper.storage")
#: Names in an address's query whose values are no secrets; those of all others may be.
HARMLESS = frozenset({"charset", "check_same_thread", "connect_timeout", "driver", "mode", "sslmode", "timeout"})
#: A shorter secret is not looked for in texts: too much would be taken for it.
SHORTEST = 4


def masked(address: str) -> str:
    """An address without password, token and the values of its query. What may belong to a secret is taken as one."""
    scheme, sep, rest = address.partition("://") if "://" in address else ("", "", address)
    owner, at, place = rest.rpartition("@")
    user, colon, secret = owner.partition(":")
    if at and secret and not set("/?#") & set(user):
        rest = f"{user}:{MASK}@{place}"
    elif at and not colon and not set("/?#") & set(owner) and scheme.lower().endswith(("http", "https")):
        rest = f"{MASK}@{place}"
    place, mark, query = re.fullmatch(r"([^?#]*)([?#]?)(.*)", rest, re.S).groups()  # type: ignore[union-attr]
    return f"{scheme}{sep}{place}{mark}{re.sub(r'[^?#&;]+', _masked_value, query)}"


def _masked_value(match: re.Match[str]) -> str:
    name, equals, value = match.group().partition("=")
    if name.lower() in HARMLESS or (equals and not value):
        return match.group()
    return f"{name}={MASK}" if equals else MASK


def conceal(address: str) -> str:
    """The masked address, from which `reveal` gives back the whole one."""
    shown = masked(address)
    if shown != address:
        os.environ[ENVIRONMENT] = json.dumps(_known() | {shown: reveal(address)})
    return shown


def reveal(address: str) -> str:
    """The whole address of a masked one; any other as it is."""
    return _known().get(address, address)


def revealed(value: Any) -> Any:
    """A config with the whole addresses in place of the masked ones."""
    if isinstance(value, Mapping):
        return {key: revealed(inner) for key, inner in value.items()}
    return reveal(value) if isinstance(value, str) else value


def without_secrets(text: str) -> str:
    """A text without the secrets of the addresses in it, nor those of any address that was concealed."""
    for shown, whole in _known().items():
        text = text.replace(whole, shown)
        for secret in sorted(_secrets(whole), key=len, reverse=True):
            text = text.replace(secret, MASK)
    return re.sub(r"[\w+.-]+:/+[^\s\"'<>]+", lambda found: masked(found.group()), text)


def _secrets(address: str) -> set[str]:
    owner, _, place = address.partition("://")[2].rpartition("@")
    user, colon, secret = owner.partition(":")
    found = set() if set("/?#") & set(user) else {secret if colon else owner}
    pairs = re.split(r"[?#&;]", place)[1:]
    found |= {value or name for name, _, value in (pair.partition("=") for pair in pairs) if name not in HARMLESS}
    found |= {urllib.parse.unquote(secret) for secret in found} | {urllib.parse.quote(s, safe="") for s in found}
    return {secret for secret in found if len(secret) >= SHORTEST and secret != MASK}


def _known() -> dict[str, str]:
    found: dict[str, str] = json.loads(os.environ.get(ENVIRONMENT, "{}"))
    return found


# In the words of a command and in what Hydra composes


def conceal_value(value: Any) -> Any:
    """A value of a config with its addresses concealed. Interpolations stay unless a secret is written beside them."""
    if isinstance(value, Mapping):
        return {key: conceal_value(inner) for key, inner in value.items()}
    if not isinstance(value, str):
        return value
    if "${" in value:
        written = re.sub(r"\$\{[^{}]*\}", "", value)
        if masked(written) == written:
            return value
        value = str(OmegaConf.create({"value": value}).value)
    return conceal(value)


def conceal_word(word: str) -> str:
    """A word of a command line with the addresses of its store, if it gives one, concealed."""
    key, _, value = word.partition("=")
    bare = key.lstrip("+")
    if not any(f"{bare}.".startswith(f"{k}.") or k.startswith(f"{bare}.") for k in KEYS) or masked(value) == value:
        return word
    try:
        parsed = OverridesParser.create().parse_override(word)
        if parsed.is_sweep_override():
            return f"{key}={','.join(encode(conceal_value(str(each))) for each in parsed.sweep_iterator())}"
        given = parsed.value()
    except HydraException:
        return f"{key}={masked(value)}"
    text = given if isinstance(given, (str, Mapping)) else getattr(given, "text", given)
    concealed = conceal_value(text)
    return word if concealed == text else f"{key}={encode(concealed)}"


def without_hydra(config: DictConfig) -> DictConfig:
    """A composed command's config as its job gets it."""
    return OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])


def words_of(overrides: Any) -> list[str]:
    """A command's words as they were written; a list gives them with their interpolations resolved."""
    written: Any = OmegaConf.to_container(overrides, resolve=False)
    return [str(word) for word in written]


def conceal_in(config: DictConfig) -> None:
    """Conceal the addresses in a composed command, before Hydra stores it; jobs are composed anew from its words."""
    overrides = config.hydra.overrides
    with read_write(config), open_dict(config):
        for name in ("task", "hydra"):
            overrides[name] = [conceal_word(word) for word in words_of(overrides[name])]
        for key in KEYS:
            group, _, name = key.rpartition(".")
            node = OmegaConf.select(config, group)
            if node is None or name not in node:
                continue
            given = node._get_node(name)._value() if not OmegaConf.is_dict(node._get_node(name)) else None
            concealed = conceal_value(given)
            if concealed != given:
                OmegaConf.update(config, key, concealed)
                overrides.hydra.append(f"{key}={encode(concealed)}")
