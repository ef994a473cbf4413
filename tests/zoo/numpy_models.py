"""Llama and DeepSeek once more, in float64 NumPy and one token, head and expert at a time."""

import math

import numpy as np


def f64(x):
    return np.asarray(x, np.float64)


def rms(x, scale, eps):
    return f64(scale) * x / np.sqrt(np.mean(x * x, -1, keepdims=True) + eps)


def linear(x, module):
    y = x @ f64(module.weight).T
    return y if module.bias is None else y + f64(module.bias)


def silu(x):
    return x / (1 + np.exp(-x))


def swiglu(x, mlp):
    return linear(silu(linear(x, mlp.gate_projection)) * linear(x, mlp.up_projection), mlp.down_projection)


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def inverse_frequencies(config, dim):
    """The default, llama3 and yarn kinds, with what cosine and sine are multiplied by."""
    scaling, kind = config.rope_scaling, type(config.rope_scaling).__name__
    inverse = [config.rope_theta ** (-2 * j / dim) for j in range(dim // 2)]
    if kind == "Llama3Scaling":
        out = []
        for f in inverse:
            turns = scaling.original_max_position_embeddings * f / (2 * math.pi)
            smooth = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
            smooth = min(max(smooth, 0.0), 1.0)
            out.append((1 - smooth) * f / scaling.factor + smooth * f)
        return np.array(out), 1.0
    if kind == "YarnScaling":

        def corr(n):
            original = scaling.original_max_position_embeddings
            return dim * math.log(original / (n * 2 * math.pi)) / (2 * math.log(config.rope_theta))

        low = max(math.floor(corr(scaling.beta_fast)), 0)
        high = min(math.ceil(corr(scaling.beta_slow)), dim - 1)
        ramp = [min(max((j - low) / (high - low), 0.0), 1.0) for j in range(dim // 2)]
        out = [f / scaling.factor * r + f * (1 - r) for f, r in zip(inverse, ramp, strict=True)]
        magnitude = [0.1 * m * math.log(scaling.factor) + 1 for m in (scaling.mscale, scaling.mscale_all_dim)]
        return np.array(out), magnitude[0] / magnitude[1]
    assert kind == "RotaryScaling"
    return np.array(inverse), 1.0


def rotate(x, position, inverse, factor, interleaved):
    """One head's vector at one position, as complex numbers."""
    half = len(inverse)
    z = x[0::2] + 1j * x[1::2] if interleaved else x[:half] + 1j * x[half:]
    z = z * np.exp(1j * position * inverse) * factor
    return np.concatenate([z.real, z.imag])


def attend(q, k, v, visible, scale):
    """[S, H, D] queries, [S, K, D] keys, [S, K, E] values of one row."""
    heads, groups = q.shape[1], q.shape[1] // k.shape[1]
    out = np.zeros((q.shape[0], heads, v.shape[2]))
    for i in range(q.shape[0]):
        seen = np.flatnonzero(visible[i])
        if len(seen):
            for h in range(heads):
                p = softmax(k[seen, h // groups] @ q[i, h] * scale)
                out[i, h] = p @ v[seen, h // groups]
    return out


def visible_keys(length, segments, valid):
    return np.array(
        [[j <= i and segments[i] == segments[j] and bool(valid[j]) for j in range(length)] for i in range(length)]
    )


def gqa(x, a, config, positions, visible):
    s, d = x.shape[0], config.head_dim
    inverse, factor = inverse_frequencies(config, d)
    q = linear(x, a.query_projection).reshape(s, -1, d)
    k = linear(x, a.key_projection).reshape(s, -1, d)
    v = linear(x, a.value_projection).reshape(s, -1, d)
    for array in (q, k):
        for i in range(s):
            for h in range(array.shape[1]):
                array[i, h] = rotate(array[i, h], positions[i], inverse, factor, False)
    return linear(attend(q, k, v, visible, d**-0.5).reshape(s, -1), a.output_projection)


def mla(x, a, config, positions, visible):
    s, heads = x.shape[0], config.num_attention_heads
    n, r, v_dim, c = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim, config.kv_lora_rank
    inverse, factor = inverse_frequencies(config, r)
    if config.q_lora_rank is None:
        q = linear(x, a.query_up)
    else:
        q = linear(rms(linear(x, a.query_down), a.query_norm.scale, 1e-6), a.query_up)
    q = q.reshape(s, heads, n + r)
    latent = linear(x, a.kv_down)
    expanded = linear(rms(latent[:, :c], a.kv_norm.scale, 1e-6), a.kv_up).reshape(s, heads, n + v_dim)
    k = np.zeros((s, heads, n + r))
    for i in range(s):
        shared = rotate(latent[i, c:], positions[i], inverse, factor, True)
        for h in range(heads):
            q[i, h, n:] = rotate(q[i, h, n:], positions[i], inverse, factor, True)
            k[i, h] = np.concatenate([expanded[i, h, :n], shared])
    scale = (n + r) ** -0.5
    mscale = getattr(config.rope_scaling, "mscale_all_dim", None)
    if mscale:
        scale *= (0.1 * mscale * math.log(config.rope_scaling.factor) + 1) ** 2
    return linear(attend(q, k, expanded[..., n:], visible, scale).reshape(s, -1), a.output_projection)


def choose(score, config):
    """The experts of one token, from the scores that selection looks at, best first."""
    size = len(score) // config.n_group
    groups = score.reshape(config.n_group, size)
    if config.topk_method == "noaux_tc":
        rank = [sum(sorted(group)[-2:]) for group in groups]
    else:
        rank = [max(group) for group in groups]
    kept = sorted(range(config.n_group), key=lambda g: -rank[g])[: config.topk_group]
    allowed = [e for g in kept for e in range(g * size, (g + 1) * size)]
    return sorted(allowed, key=lambda e: -score[e])[: config.num_experts_per_tok]


def moe(x, m, config, valid):
    """The output, and how often each expert was chosen."""
    out, load = np.zeros_like(x), np.zeros(config.n_routed_experts)
    for i in range(x.shape[0]):
        if valid[i]:
            logits = f64(m.router.weight) @ x[i]
            if config.scoring_func == "sigmoid":
                score = 1 / (1 + np.exp(-logits))
                chosen = choose(score + f64(m.router.bias.value), config)
            else:
                score = softmax(logits)
                chosen = choose(score, config)
            weights = score[chosen]
            if config.norm_topk_prob:
                weights = weights / weights.sum()
            for e, w in zip(chosen, weights * config.routed_scaling_factor, strict=True):
                hidden = silu(f64(m.experts.gate_weight[e]) @ x[i]) * (f64(m.experts.up_weight[e]) @ x[i])
                out[i] += w * (f64(m.experts.down_weight[e]) @ hidden)
                load[e] += 1
    return (out if m.shared is None else out + swiglu(x, m.shared)), load


def block(x, b, config, positions, visible, valid):
    attention = mla if hasattr(config, "kv_lora_rank") else gqa
    x = x + attention(rms(x, b.attention_norm.scale, config.rms_norm_eps), b.attention, config, positions, visible)
    normed = rms(x, b.feed_forward_norm.scale, config.rms_norm_eps)
    if b.mlp is not None:
        return x + swiglu(normed, b.mlp), None
    update, load = moe(normed, b.moe, config, valid)
    return x + update, load


def row(model, tokens, positions, segments, valid):
    """One row: states after the final norm, logits, loads by layer, and states, validity and loads by MTP depth."""
    config = model.config
    embedding = f64(model.embedding.weight)
    visible = visible_keys(len(tokens), segments, valid)
    x, loads = embedding[tokens], []
    for stack in model.stacks().values():
        for layer in stack:
            x, load = block(x, layer, config, positions, visible, valid)
            if load is not None:
                loads.append(load)
    states = rms(x, model.norm.scale, config.rms_norm_eps)
    head = embedding if model.head is None else f64(model.head.weight)
    depths, previous = [], states
    for k, module in enumerate(getattr(model, "mtp", ()), start=1):
        length = len(tokens)
        fits = [
            i + k < length and segments[i + k] == segments[i] and bool(valid[i]) and bool(valid[i + k])
            for i in range(length)
        ]
        later = np.array([embedding[tokens[i + k]] if i + k < length else np.zeros_like(x[0]) for i in range(length)])
        joined = np.concatenate(
            [
                rms(later, module.embedding_norm.scale, config.rms_norm_eps),
                rms(previous, module.hidden_norm.scale, config.rms_norm_eps),
            ],
            -1,
        )
        x, load = block(
            linear(joined, module.projection),
            module.block,
            config,
            positions,
            visible_keys(length, segments, fits),
            fits,
        )
        previous = rms(x, module.norm.scale, config.rms_norm_eps)
        depths.append((previous, fits, load))
    return states, states @ head.T, loads, depths


def forward(model, tokens, positions=None, segment_ids=None, mask=None):
    """`row` for each row of a batch."""
    tokens = np.asarray(tokens)
    shape = tokens.shape
    positions = np.broadcast_to(np.arange(shape[1]) if positions is None else np.asarray(positions), shape)
    segments = np.zeros(shape, int) if segment_ids is None else np.asarray(segment_ids)
    valid = np.ones(shape, bool) if mask is None else np.asarray(mask)
    return [row(model, *parts) for parts in zip(tokens, positions, segments, valid, strict=True)]


def cross_entropy(logits, targets):
    """Sum and count over the targets that aren't -100."""
    chosen = [(float(np.log(np.exp(z - z.max()).sum()) + z.max() - z[t])) for z, t in zip(logits, targets) if t != -100]
    return sum(chosen), len(chosen)
