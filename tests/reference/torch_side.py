"""What transformers makes of a family: the only module here that needs torch.

Everything runs eagerly on the CPU, attention and experts included, without padding, as other paths round otherwise.
"""

import contextlib
import json
import pathlib
import tempfile

import tensors
import torch
import transformers
from families import reference_config
from safetensors.torch import load_file
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

MTP_WEIGHT = 0.3
EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}
_MTP_EXTRAS = ("enorm.weight", "hnorm.weight", "shared_head.norm.weight")


def quiet():
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def load(folder, dtype=torch.float32):
    """The model in a folder; every tensor of the file is used and none is missing, except for MTP layers."""
    model, found = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, output_loading_info=True, **EAGER
    )
    extra = f"model.layers.{model.config.num_hidden_layers}."
    assert not found["missing_keys"] and not found["mismatched_keys"], found
    assert all(name.startswith(extra) for name in found["unexpected_keys"]), found
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval()


def shapes(family):
    """{name on disk: shape} of a family, as `save_pretrained` writes it, and the names of released MTP layers."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        (folder / "config.json").write_text(json.dumps(reference_config(family)))
        config = transformers.AutoConfig.from_pretrained(folder)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, **EAGER)
        model.save_pretrained(folder / "saved")
        saved = {n: tuple(t.shape) for n, t in sorted(load_file(folder / "saved" / "model.safetensors").items())}
    last, vocab, width = config.num_hidden_layers - 1, config.vocab_size, config.hidden_size
    for depth in range(_mtp_depths(family)):
        prefix = f"model.layers.{last + 1 + depth}."
        block = {n: s for n, s in saved.items() if n.startswith(f"model.layers.{last}.")}
        saved |= {prefix + n.split(".", 3)[3]: s for n, s in block.items()}
        saved |= {prefix + n: (width,) for n in _MTP_EXTRAS} | {prefix + "eh_proj.weight": (width, 2 * width)}
        saved |= {prefix + n: (vocab, width) for n in ("embed_tokens.weight", "shared_head.head.weight")}
    return saved


def _mtp_depths(family):
    return reference_config(family).get("num_nextn_predict_layers", 0)


def cross_entropy(logits, targets):
    return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


@torch.no_grad()
def logits(model, tokens):
    return model(torch.as_tensor(tokens).long(), use_cache=False).logits.float().numpy()


@torch.no_grad()
def greedy(model, tokens, mask=None):
    tokens = torch.as_tensor(tokens).long()
    mask = torch.ones_like(tokens) if mask is None else torch.as_tensor(mask).long()
    made = model.generate(
        tokens, attention_mask=mask, max_new_tokens=tensors.NEW_TOKENS, do_sample=False, use_cache=True
    )
    return made[:, tokens.shape[1] :].numpy()


def mtp_model(model):
    """The multi-token-prediction layers that lie beside `model` in its folder."""
    # Each class names the layer that its released checkpoints have, which is another than a tiny one's.
    model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{model.config.num_hidden_layers}\..*"]
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng())
        return MtpModel.from_pretrained(model).eval()


def mtp_states(layers, states, tokens):
    """The states of the first MTP layer: at index i from the main model's at i and from token i + 1."""
    positions = torch.arange(1, tokens.shape[1])[None]
    cache = MtpCache(config=layers.config)
    return layers.forward_layer(0, states[:, :-1], positions, cache, input_ids=tokens[:, 1:])


def _split_mtp(layers, number):
    """{name on disk: gradient} of an MTP layer whose experts are fused in memory."""
    renamed = {}
    for name, parameter in layers.layers[0].named_parameters():
        name = name.removeprefix("mtp_block.").replace("post_norm.", "shared_head.norm.", 1)
        prefix, gradient = f"model.layers.{number}.", parameter.grad
        if name == "mlp.experts.gate_up_proj":
            for i, (gate, up) in enumerate(zip(*gradient.chunk(2, dim=1), strict=True)):
                renamed[f"{prefix}mlp.experts.{i}.gate_proj.weight"] = gate
                renamed[f"{prefix}mlp.experts.{i}.up_proj.weight"] = up
        elif name == "mlp.experts.down_proj":
            renamed |= {f"{prefix}mlp.experts.{i}.down_proj.weight": down for i, down in enumerate(gradient)}
        else:
            renamed[prefix + name] = gradient
    return {name: gradient.numpy().copy() for name, gradient in renamed.items()}


def save_gradients(model, folder):
    """{name on disk: gradient} of a model after its backward pass, through transformers' own way to disk."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
        for buffer in model.buffers():
            buffer.zero_()
    model.save_pretrained(folder)
    return {name: tensor.numpy() for name, tensor in load_file(folder / "model.safetensors").items()}


def reference(family, folder):
    """All that tests compare, for the checkpoint in `folder`. The loss of a model with MTP includes theirs."""
    tokens = torch.as_tensor(tensors.tokens(family)).long()
    model = load(folder)
    values = {"greedy": greedy(model, tokens)}
    # A new one, since dynamic scalings remember how long sequences have been.
    model = load(folder)
    made = model(tokens, use_cache=False, output_hidden_states=True)
    loss = cross_entropy(made.logits[:, :-1], tokens[:, 1:])
    values |= {"logits": made.logits.detach().numpy(), "loss": loss.item()}
    gradients = {}
    if _mtp_depths(family):
        layers = mtp_model(model)
        states = mtp_states(layers, made.hidden_states[-1], tokens)
        mtp_logits = model.lm_head(states)
        mtp_loss = cross_entropy(mtp_logits[:, :-1], tokens[:, 2:])
        values |= {"mtp_states": states.detach().numpy(), "mtp_loss": mtp_loss.item()}
        loss = loss + MTP_WEIGHT * mtp_loss
        loss.backward()
        gradients |= _split_mtp(layers, model.config.num_hidden_layers)
    else:
        loss.backward()
    with tempfile.TemporaryDirectory() as scratch:
        gradients |= save_gradients(model, pathlib.Path(scratch))
    values["gradients"] = dict(sorted(gradients.items()))
    values["bfloat16_logits"] = logits(load(folder, torch.bfloat16), tokens)
    return values
