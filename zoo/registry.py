"""The models that can be built by name.

Sizes are those of the models' public config.json files; weights are not in here. Names that start with
`overspill` are small enough to train on two CPU cores, on bytes.
"""

import os
from collections.abc import Mapping
from typing import Any

from .config import Config
from .hf_config import from_config
from .registry_dense import DENSE
from .registry_moe import EXPERTS

_NAMES = sorted(DENSE | EXPERTS, key=lambda name: name.startswith("overspill"))
REGISTRY: dict[str, Config] = {name: (DENSE | EXPERTS)[name] for name in _NAMES}


def find_config(source: str | os.PathLike | Mapping[str, Any] | Config) -> Config:
    """What `hf_config.from_config` gives: a registered model's config, a file's, or the config itself.

    Raises ValueError, with near names, on a name that is neither registered nor there.
    """
    return from_config(source)
