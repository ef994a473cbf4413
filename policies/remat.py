"""From annotations to the program: `checkpoint` runs a module under `jax.checkpoint` as it is annotated."""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
from jaxtyping import PyTree

from .activation import Placement, annotations, named
from .spaces import HOST_MEMORY
from .support import check_support

_inside = contextvars.ContextVar("overspill_inside_checkpoint", default=False)


@functools.cache
def _policy(saved: frozenset[str], offloaded: frozenset[str]) -> Callable[..., Any]:
    # Policies are closures that don't compare equal: one object for each set of names, or JAX retraces.
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=sorted(saved),
        names_which_can_be_offloaded=sorted(offloaded),
        offload_src="device",
        offload_dst=HOST_MEMORY,
    )


def policy(tree: PyTree) -> Callable[..., Any]:
    """The `jax.checkpoint` policy that the annotations of `tree` ask for, by the Activations' paths.

    Equal annotations give the same object. Raises ValueError when two activations share a name and
    disagree about its placement.
    """
    placements: dict[str, Placement] = {}
    for path, activation in annotations(named(tree)):
        name = activation.path or path
        if placements.setdefault(name, activation.placement) != activation.placement:
            raise ValueError(
                f"activation {name!r} is placed on {placements[name]!s} and on {activation.placement!s}: "
                "one name can wait in one place only"
            )
    by_place = {place: frozenset(n for n, p in placements.items() if p == place) for place in Placement}
    if by_place[Placement.HOST]:
        check_support(sorted(by_place[Placement.HOST]))
    return _policy(by_place[Placement.DEVICE], by_place[Placement.HOST])


@contextlib.contextmanager
def _entered() -> Iterator[None]:
    token = _inside.set(True)
    try:
        yield
    finally:
        _inside.reset(token)


def _kind(module: Any) -> str:
    return f"the function {module.__name__!r}" if hasattr(module, "__name__") else type(module).__name__


class Checkpointed(eqx.Module):
    """A module that runs under `jax.checkpoint` with the policy of its own annotations."""

    module: Callable[..., Any]
    prevent_cse: bool = eqx.field(static=True)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _inside.get():
            # Nested checkpoints lose the inner one's offload without a word: the outer one decides.
            return self.module(*args, **kwargs)
        if not annotations(self.module):
            raise ValueError(
                f"policies.checkpoint got {_kind(self.module)}, which holds no Activation: all of it would be "
                "recomputed. Pass the annotated module itself, not a function that closes over it"
            )
        module = named(self.module)
        arrays, rest = eqx.partition((module, args, kwargs), eqx.is_array)
        static_out: list[Any] = []

        def body(arrays: PyTree) -> PyTree:
            module, args, kwargs = eqx.combine(arrays, rest)
            with _entered():
                out = module(*args, **kwargs)
            array_out, other = eqx.partition(out, eqx.is_array)
            static_out.append(other)
            return array_out

        array_out = jax.checkpoint(body, policy=policy(module), prevent_cse=self.prevent_cse)(arrays)
        return eqx.combine(array_out, static_out[-1])


def checkpoint(module: Callable[..., Any], *, prevent_cse: bool = True) -> Callable[..., Any]:
    """`module`, run so that each of its annotated activations waits where its annotation says.

    Works for any callable PyTree that holds `Activation`s: one layer imported into research code, a
    block, a whole model. What is annotated `device` is kept, `host` is copied to pinned host memory in
    the forward pass and back in the backward pass, and everything else, annotated `recompute` or not
    annotated at all, is computed again. Values and gradients are those of `module` up to rounding.

    Activations are named by their path from `module`, or keep the path that an enclosing model gave
    them. Inside another `checkpoint` this one does nothing: the outer one's policy holds.

    **Arguments:**

    - `module`: the callable; its array leaves and arguments may be differentiated.
    - `prevent_cse`: as in `jax.checkpoint`. False is right, and faster, for the body of a scan of two
        or more steps.

    Raises ValueError, when called, if `module` holds no Activation at all (a lambda around a layer hides
    them), and RuntimeError where JAX would silently do something else: with the `jax_remat3` flag on a
    version of JAX whose implementation ignores offload.
    """
    return Checkpointed(module, prevent_cse)
