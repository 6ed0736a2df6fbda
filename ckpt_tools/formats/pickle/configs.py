"""Configs in pickles, opened to be shown: those of argparse, OmegaConf and Lightning.

They stay closed values: what is copied is the pickle.
"""

from __future__ import annotations

from ckpt_tools.core.plain_values import PlainValue
from ckpt_tools.core.text import is_text
from ckpt_tools.formats.pickle.limits import (
    MAX_CONFIG_DEPTH,
    MAX_CONFIG_VALUES,
    MAX_KEY_BITS,
    TextBound,
)
from ckpt_tools.formats.pickle.nodes import Instance, shown

CONFIG_CLASSES = frozenset(
    {
        "argparse.Namespace",
        "lightning.fabric.utilities.data.AttributeDict",
        "lightning.pytorch.utilities.parsing.AttributeDict",
        "lightning_fabric.utilities.data.AttributeDict",
        "pytorch_lightning.utilities.parsing.AttributeDict",
        "types.SimpleNamespace",
    }
)
_OMEGACONF = ("omegaconf.dictconfig.", "omegaconf.listconfig.", "omegaconf.nodes.")


def is_config(qualname: str) -> bool:
    """Whether a global is the class of a config."""
    return qualname in CONFIG_CLASSES or qualname.startswith(_OMEGACONF)


class Configs:
    """Opens the configs of one pickle, up to a number of values in all."""

    def __init__(self, text: TextBound) -> None:
        self._left = MAX_CONFIG_VALUES
        self._text = text

    def fields(self, config: Instance) -> PlainValue:
        """What a config holds; None where it is too much or endless."""
        try:
            return self._plain(config, 0)
        except _EndlessError:
            return None

    def _plain(self, value: object, depth: int) -> PlainValue:
        self._left -= 1
        if self._left < 0 or depth > MAX_CONFIG_DEPTH:
            raise _EndlessError
        if isinstance(value, Instance) and is_config(value.qualname):
            return self._plain(self._inside(value), depth + 1)
        if isinstance(value, dict):
            return {self._key(key): self._plain(item, depth + 1) for key, item in value.items()}
        if isinstance(value, list | tuple | set | frozenset):
            return [self._plain(item, depth + 1) for item in value]
        return self._leaf(value)

    def _inside(self, config: Instance) -> object:
        """What it holds: OmegaConf's containers and nodes keep that in an attribute."""
        state = config.state if type(config.state) is dict else {}
        for name in ("_content", "_val"):
            if name in state:
                return state[name]
        return {self._key(key): item for key, item in config.pairs or ()} or state

    def _key(self, key: object) -> str | int:
        leaf = self._leaf(key)
        return leaf if type(leaf) in {str, int} else str(leaf)  # type: ignore[return-value]  # seen

    def _leaf(self, value: object) -> PlainValue:
        self._text.meet(value)
        return _leaf(value)


class _EndlessError(Exception):
    """A config that holds too much, or itself."""


def _leaf(value: object) -> PlainValue:
    """A value as it is, or what stands there in angle brackets."""
    if type(value) is str:
        return value if is_text(value) else value.encode("utf-8", "backslashreplace").decode()
    if type(value) is int and value.bit_length() <= MAX_KEY_BITS:
        return value
    if value is None or isinstance(value, bool | float):
        return value
    return f"<{shown(value).removeprefix('a ')}>"
