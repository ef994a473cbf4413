"""Golden files: what the tests without torch compare with, a few kilobytes a family.

Logits are kept at a dozen positions, the rest of them and every gradient as a norm and projections on fixed directions:
a wrong element anywhere changes those. Files are NumPy archives without pickle.
"""

import json
import pathlib

import numpy as np
import tensors

FOLDER = pathlib.Path(__file__).parent / "golden"
# More for the logits, which are one array; a tensor has its norm beside them.
LOGIT_PROJECTIONS, GRADIENT_PROJECTIONS = 8, 4
# A gradient this far below the norm of all of them is rounding: what the reference computes of it means nothing.
NOTHING = 1e-6
_STATES = ("logits", "mtp_states")


def kept(array):
    """The positions that golden files hold, `[positions, features]`; none of them is the last, which MTP lacks."""
    return np.stack([array[row, position] for row, position in tensors.KEPT if position < array.shape[1]])


def errors(actual, expected):
    """How far states are from others: over all, and for the median token, whom no other choice of experts moved."""
    difference = np.linalg.norm(actual - expected, axis=-1) / np.linalg.norm(expected, axis=-1)
    return np.array([np.linalg.norm(actual - expected) / np.linalg.norm(expected), np.median(difference)])


def summary(shapes, values):
    """The arrays of a golden file from `torch_side.shapes` and `torch_side.reference`."""
    found = {
        "tensors": np.frombuffer(json.dumps({n: list(s) for n, s in shapes.items()}).encode(), np.uint8),
        "loss": np.float64(values["loss"]),
        "greedy": values["greedy"].astype(np.int32),
        "bfloat16_errors": errors(values["bfloat16_logits"], values["logits"]),
    }
    if "mtp_loss" in values:
        found["mtp_loss"] = np.float64(values["mtp_loss"])
    for name in _STATES:
        if name in values:
            found[name] = kept(values[name])
            found[f"{name}_norm"] = np.linalg.norm(values[name].astype(np.float64))
            found[f"{name}_projections"] = tensors.project(name, values[name], LOGIT_PROJECTIONS)
    names = sorted(values["gradients"])
    found["gradients"] = np.frombuffer(json.dumps(names).encode(), np.uint8)
    found["gradient_norms"] = np.array([np.linalg.norm(values["gradients"][n].astype(np.float64)) for n in names])
    found["gradient_projections"] = np.array(
        [tensors.project(n, values["gradients"][n], GRADIENT_PROJECTIONS) for n in names]
    ).astype(np.float32)
    return found


def path(family):
    return FOLDER / f"{family}.npz"


def save(family, arrays):
    FOLDER.mkdir(exist_ok=True)
    np.savez_compressed(path(family), allow_pickle=False, **arrays)


def load(family):
    """The arrays of a family, names decoded: `tensors` is {name: shape}, `gradients` a list of names."""
    with np.load(path(family), allow_pickle=False) as file:
        arrays = dict(file)
    arrays["tensors"] = {n: tuple(s) for n, s in json.loads(arrays["tensors"].tobytes()).items()}
    arrays["gradients"] = json.loads(arrays["gradients"].tobytes())
    return arrays


def state_error(name, actual, golden):
    """The largest of: normwise and maximum errors at the kept positions, and the error that the projections show."""
    expected, at = golden[name], kept(actual)
    scale = golden[f"{name}_norm"]
    moved = tensors.project(name, actual, LOGIT_PROJECTIONS) - golden[f"{name}_projections"]
    return max(
        np.linalg.norm(at - expected) / np.linalg.norm(expected),
        np.abs(at - expected).max() / np.abs(expected).max(),
        np.sqrt(np.mean(moved**2)) / scale,
    )


def gradient_errors(actual, golden):
    """{name: normwise error} of gradients on disk's layout, estimated from norm and projections.

    Where the reference has nothing there may be no gradient at all.
    """
    nothing = NOTHING * np.linalg.norm(golden["gradient_norms"])
    found = {}
    for name, norm, projections in zip(
        golden["gradients"], golden["gradient_norms"], golden["gradient_projections"], strict=True
    ):
        if norm < nothing and (name not in actual or np.linalg.norm(actual[name]) < nothing):
            found[name] = 0.0
            continue
        gradient = np.asarray(actual[name], np.float64)
        moved = tensors.project(name, gradient, GRADIENT_PROJECTIONS) - projections
        found[name] = max(abs(np.linalg.norm(gradient) - norm), np.sqrt(np.mean(moved**2))) / norm
    return found
