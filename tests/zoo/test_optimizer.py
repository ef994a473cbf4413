import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from overspill.layers.linear import Buffer
from overspill.zoo.building import abstract
from overspill.zoo.config import LlamaConfig
from overspill.zoo.moe_config import DeepSeekConfig
from overspill.zoo.optimizer import adamw, arrays_by_path, decayed, trainable, warmup_cosine

LLAMA = LlamaConfig(
    vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2,
    num_key_value_heads=1, max_position_embeddings=64, attention_bias=True, mlp_bias=True,
)  # fmt: skip
DEEPSEEK = DeepSeekConfig(
    vocab_size=40, hidden_size=16, intermediate_size=24, moe_intermediate_size=8, num_hidden_layers=3,
    num_attention_heads=2, max_position_embeddings=64, q_lora_rank=8, kv_lora_rank=8, qk_nope_head_dim=8,
    qk_rope_head_dim=4, v_head_dim=8, n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1, n_group=1,
    topk_group=1, scoring_func="sigmoid", topk_method="noaux_tc", norm_topk_prob=True, routed_scaling_factor=2.5,
    first_k_dense_replace=1, num_nextn_predict_layers=1,
)  # fmt: skip


def params(config, **kwargs):
    return arrays_by_path(trainable(abstract(config, **kwargs))[0])


def test_trainable_parts_with_buffers_and_back():
    model = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), abstract(DEEPSEEK))
    parameters, rest = trainable(model)
    assert {*arrays_by_path(rest)} == {
        "moe_layers.segments.0.moe.router.bias.value",
        "mtp.0.block.moe.router.bias.value",
    }
    assert {*arrays_by_path(parameters)} | {*arrays_by_path(rest)} == {*arrays_by_path(model)}
    assert not {*arrays_by_path(parameters)} & {*arrays_by_path(rest)}
    assert {*arrays_by_path(trainable(abstract(DEEPSEEK))[0])} == {*arrays_by_path(parameters)}
    with pytest.raises(ValueError, match="'a' is an array of int32"):
        trainable({"a": jnp.arange(3), "b": Buffer(jnp.arange(3))})


@pytest.mark.parametrize("config", [LLAMA, DEEPSEEK])
def test_decay_leaves_norms_and_biases_alone_looped_or_scanned(config):
    scanned, looped = (decayed(params(config, scan=scan)) for scan in (True, False))
    assert scanned == looped
    assert not any(value for path, value in scanned.items() if "norm" in path or path.endswith(("bias", "scale")))
    left = {path for path, value in scanned.items() if not value}
    shapes = {path: leaf.shape for path, leaf in params(config).items()}
    # By what they are: without their layer axis they are vectors, and every other parameter is a matrix.
    vectors = {p for p, shape in shapes.items() if len(shape) - (".segments." in p) == 1}
    assert left == vectors and len(left) >= 7
    assert scanned["embedding.weight"] and not scanned["norm.scale"]
    if config is DEEPSEEK:
        assert scanned["moe_layers.segments.0.moe.router.weight"]


def test_adamw_against_numpy():
    rng = np.random.default_rng(0)
    values = {"x.weight": rng.normal(size=(3, 2)), "norm.scale": rng.normal(size=3)}
    gradients = [{k: rng.normal(size=v.shape) for k, v in values.items()} for _ in range(4)]
    optimizer = adamw(0.1, b1=0.8, b2=0.9, eps=1e-8, weight_decay=0.3)
    theta = jax.tree.map(lambda v: jnp.asarray(v, jnp.float32), values)
    state = optimizer.init(theta)
    for g in gradients:
        updates, state = optimizer.update(jax.tree.map(lambda v: jnp.asarray(v, jnp.float32), g), state, theta)
        theta = optax.apply_updates(theta, updates)
    for name, value in values.items():
        m, v = 0.0, 0.0
        decay = 0.3 if name == "x.weight" else 0.0
        for t, g in enumerate(gradients, start=1):
            m, v = 0.8 * m + 0.2 * g[name], 0.9 * v + 0.1 * g[name] ** 2
            value = value - 0.1 * (m / (1 - 0.8**t) / (np.sqrt(v / (1 - 0.9**t)) + 1e-8) + decay * value)
        assert np.linalg.norm(theta[name] - value) < 1e-5 * np.linalg.norm(value)


def test_warmup_cosine():
    schedule = warmup_cosine(2.0, steps=110, warmup=10, final_fraction=0.1)
    rates = np.array([float(schedule(i)) for i in range(130)])
    np.testing.assert_allclose(rates[:11], 2 * np.arange(1, 12) / 11, rtol=1e-6)
    np.testing.assert_allclose(rates[60], 2 * (0.1 + 0.9 * 0.5), rtol=1e-6)
    np.testing.assert_allclose(rates[110:], 0.2, rtol=1e-6)
    assert (np.diff(rates[10:111]) < 0).all()
    assert float(jax.jit(schedule)(jnp.int32(60))) == pytest.approx(rates[60], rel=1e-6)
    assert float(warmup_cosine(1.0, steps=1)(0)) == 1.0
    for wrong in ({"steps": 0}, {"steps": 5, "warmup": 6}, {"steps": 5, "final_fraction": 2}):
        with pytest.raises(ValueError):
            warmup_cosine(1.0, **wrong)


@pytest.mark.parametrize("model", ["llama-3-8b", {"a": None}, Buffer(jnp.zeros(3))])
def test_what_holds_no_parameter_is_refused(model):
    with pytest.raises(ValueError, match=f"{type(model).__name__} holds no array that could be trained"):
        trainable(model)
