"""Writes the golden files: `python tests/reference/make_golden.py [family ...]`, with the `parity` extra installed.

Before it writes one it makes sure that the reference can hide nothing: every tensor of the checkpoint moves the logits,
and no choice of an expert, a key or a token is so close that another order of additions could turn it.
"""

import pathlib
import sys
import tempfile

import golden_files
import numpy as np
import tensors
import torch
import torch_side
from families import FAMILIES, reference_config

# Far above what rounding does to a weight, and to a score.
_NOISE, _DRAWS = 1e-5, 6


def choices(model, tokens):
    """Which experts and keys every token chose, as sets; keys that the causal mask hides aren't chosen."""
    found = []

    def note(module, arguments, made):
        if torch.is_tensor(made):  # an indexer's keys
            chosen = torch.zeros(*made.shape[:2], made.shape[1], dtype=torch.bool).scatter(-1, made.long(), True)
            found.append(chosen & torch.ones(chosen.shape[-2:], dtype=torch.bool).tril())
        else:
            found.append(made[-1].sort(dim=-1).values)

    routers = [m for m in model.modules() if type(m).__name__.lower().endswith(("topkrouter", "indexer"))]
    hooks = [module.register_forward_hook(note) for module in routers]
    made = torch_side.logits(model, tokens)
    for hook in hooks:
        hook.remove()
    return made, found


@torch.no_grad()
def close_choices(family, folder):
    """What a little noise in the weights changes; nothing, for a good reference."""
    tokens = tensors.tokens(family)
    _, plain = choices(torch_side.load(folder), tokens)
    continued = torch_side.greedy(torch_side.load(folder), tokens)
    changed = set()
    for draw in range(_DRAWS):
        noisy = torch_side.load(folder)
        for name, tensor in noisy.state_dict().items():
            noise = torch.from_numpy(tensors.normal(f"noise {draw} {name}", tuple(tensor.shape)))
            tensor.copy_(tensor * (1 + _NOISE * noise))
        _, found = choices(noisy, tokens)
        changed |= (
            {"experts or keys"} if any(not torch.equal(a, b) for a, b in zip(plain, found, strict=True)) else set()
        )
        changed |= {"tokens"} if not np.array_equal(torch_side.greedy(noisy, tokens), continued) else set()
    return changed


@torch.no_grad()
def idle_tensors(family, folder, shapes, values):
    """The tensors on disk that logits don't depend on: by the gradient or, where there is none, by changing them."""
    gradients = values["gradients"]
    norms = {name: np.linalg.norm(gradient) for name, gradient in gradients.items()}
    nothing = golden_files.NOTHING * np.linalg.norm(list(norms.values()))
    idle = []
    for name in shapes:
        if norms.get(name, 0) > nothing:
            continue
        model = torch_side.load(folder)
        own = dict(model.state_dict())
        if name in own:
            own[name].copy_(
                torch.from_numpy(tensors.weight(name, shapes[name], family) + 0.2 * tensors.normal(name, shapes[name]))
            )
            moved = torch_side.logits(model, tensors.tokens(family))
            if np.linalg.norm(moved - values["logits"]) > 1e-4 * np.linalg.norm(values["logits"]):
                continue
        idle.append(name)
    return idle


def may_be_idle(name, family):
    """A shift of all keys alike changes no softmax, unless they are rotated; MTP has copies of what it shares."""
    config = FAMILIES[family]
    layer = int(name.split(".")[2]) if name.startswith("model.layers.") else -1
    if layer == config["num_hidden_layers"]:
        return name.endswith(("embed_tokens.weight", "shared_head.head.weight", "e_score_correction_bias"))
    if family == "deepseek_v32_all_keys" and ".indexer." in name:
        return True
    return config["model_type"] == "smollm3" and name.endswith("k_proj.bias") and not config["no_rope_layers"][layer]


def make(family):
    """(shapes, arrays of the golden file) of a family. Raises AssertionError for one that could hide a fault."""
    shapes = torch_side.shapes(family)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        tensors.write_folder(folder, family, shapes, reference_config(family))
        values = torch_side.reference(family, folder)
        changed = close_choices(family, folder)
        assert not changed, f"{family}: {changed} hang by less than rounding: another seed"
        idle = [n for n in idle_tensors(family, folder, shapes, values) if not may_be_idle(n, family)]
        assert not idle, f"{family}: nothing depends on {idle}: another seed"
    return golden_files.summary(shapes, values)


def main(families):
    torch.set_num_threads(1)
    torch_side.quiet()
    for family in families or FAMILIES:
        golden_files.save(family, make(family))
        print(f"{golden_files.path(family).stat().st_size:7d} bytes  {family}")


if __name__ == "__main__":
    main(sys.argv[1:])
