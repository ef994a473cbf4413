"""The models that can be built by name.

Sizes are those of the models' public config.json files; weights are not in here. Names that start with
`overspill` are small enough to train on two CPU cores, on bytes.
"""

from .config import Config
from .registry_dense import DENSE
from .registry_moe import EXPERTS

_NAMES = sorted(DENSE | EXPERTS, key=lambda name: name.startswith("overspill"))
REGISTRY: dict[str, Config] = {name: (DENSE | EXPERTS)[name] for name in _NAMES}
