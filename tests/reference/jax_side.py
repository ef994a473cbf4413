"""What Overspill makes of a family, in the reference's terms."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from overspill import zoo
from overspill.zoo.data import Batch
from overspill.zoo.weights import leaves

# As in training, without the balance loss: transformers has none of DeepSeek's kind.
MTP_WEIGHT = 0.3
# Programs that run once: optimising them takes longer than they do.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def batch(tokens):
    """Rows of one document each, all of it real."""
    tokens = jnp.asarray(tokens, jnp.int32)
    targets = jnp.concatenate([tokens[:, 1:], jnp.full_like(tokens[:, :1], -100)], axis=1)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    return Batch(tokens, targets, jnp.zeros_like(tokens), positions, jnp.ones(tokens.shape, bool))


@jit
def _values(parameters, rest, tokens):
    def loss(parameters):
        logits = eqx.combine(parameters, rest)(tokens)
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), tokens[:, 1:, None], axis=-1)
        return -jnp.mean(chosen), logits

    (loss, logits), gradients = jax.value_and_grad(loss, has_aux=True)(parameters)
    return {"logits": logits, "loss": loss}, gradients


@jit
def _mtp_values(parameters, rest, tokens):
    def loss(parameters):
        losses = eqx.combine(parameters, rest).losses(batch(tokens))
        main, ahead = losses.sum / losses.count, losses.mtp_sum[0] / losses.mtp_count[0]
        return main + MTP_WEIGHT * ahead, {"loss": main, "mtp_loss": ahead}

    (_, found), gradients = jax.value_and_grad(loss, has_aux=True)(parameters)
    model = eqx.combine(parameters, rest)
    (depth,) = model.mtp_hidden(model.hidden(tokens)[0], tokens)
    return found | {"logits": model(tokens), "mtp_states": depth.states[:, :-1]}, gradients


def values(model, tokens):
    """logits, loss, states and loss of an MTP module where there is one, and gradients as {name on disk: array}.

    The gradients are of the loss, and with MTP of the loss that training has.
    """
    run = _mtp_values if getattr(model, "mtp", ()) else _values
    found, gradients = run(*zoo.trainable(model), jnp.asarray(tokens))
    return {name: np.asarray(value) for name, value in found.items()} | {"gradients": on_disk(gradients)}


@jit
def _logits(model, tokens):
    return model(tokens)


def logits(model, tokens):
    return np.asarray(_logits(model, jnp.asarray(tokens)).astype(jnp.float32))


def on_disk(model):
    """{name on disk: array} of a model's arrays, or of gradients in its shape, as files for transformers have them."""
    arrays = {}
    for leaf in leaves(model):
        source = np.asarray(leaf.array)
        for piece in leaf.pieces(leaf.sources[0]):
            shape = piece.layout.tensor_shape(leaf.piece_shape(piece))
            # Gate and up may share a tensor, of which each fills its part.
            tensor = arrays.setdefault(piece.name, np.full(shape, np.nan, source.dtype))
            piece.layout.view(tensor)[...] = source[piece.index]
    return arrays
