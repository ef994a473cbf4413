import json
import os
import re
import signal
import subprocess
import sys
import warnings

import numpy as np
import pytest
from typer.testing import CliRunner

from overspill.zoo import generation, pretrained, speaking
from overspill.zoo.command import app

tokenizers = pytest.importorskip("tokenizers")

ALPHABET = ["<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>"]
CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 300, "hidden_size": 16,
    "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 500.0, "eos_token_id": 1,
}  # fmt: skip
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def byte_tokenizer():
    """Byte-level, without merges: every byte is a token, so characters are split over several."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=5 + 256, initial_alphabet=alphabet, special_tokens=ALPHABET, show_progress=False
    )
    made.train_from_iterator(["a"], trainer)
    made.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return made


@pytest.fixture
def folder(tmp_path):
    """A model folder without weights: what comes before them is all checked without."""
    made = tmp_path / "model"
    made.mkdir()
    byte_tokenizer().save(str(made / "tokenizer.json"))
    (made / "config.json").write_text(json.dumps(CONFIG))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    (made / "tokenizer_config.json").write_text(json.dumps(settings))
    return made


def ids_of(text):
    return byte_tokenizer().encode(text, add_special_tokens=False).ids


@pytest.fixture
def model(folder, monkeypatch):
    """Stand-ins for the weights and the model: what it says is `model.says`, what it was asked is in `model.asked`."""

    class Model:
        says = [*ids_of("Grüße, 日本!"), 1, *ids_of("unheard")]
        asked = None
        dtype = None

        def __repr__(self):
            return "Model(tiny [bold])"

    def load(source, *, dtype=None):
        Model.dtype = dtype
        warnings.warn("the files have more", stacklevel=2)
        return Model()

    def stream(model, tokens, **options):
        Model.asked = {"tokens": np.asarray(tokens).tolist(), **options}
        for token in Model.says[: options["max_new_tokens"]]:
            if isinstance(token, BaseException):
                raise token
            yield np.asarray([token], np.int32)
            if token in options["stop_ids"]:
                return

    monkeypatch.setattr(pretrained, "load", load)
    monkeypatch.setattr(generation, "stream", stream, raising=False)
    return Model


def invoke(*arguments, input=None):
    return CliRunner().invoke(app, ["generate", *map(str, arguments)], input=input, env={"COLUMNS": "200"})


def test_text_goes_out_and_notes_aside(folder, model):
    result = invoke(folder, "Hi é")
    assert result.exit_code == 0, result.output
    assert result.stdout == "Grüße, 日本!\n"
    assert model.asked["tokens"] == [[0, *ids_of("Hi é")]]
    assert model.asked["allowed"] == 261 and model.asked["stop_ids"] == (1,) and model.dtype is None
    assert model.asked["max_new_tokens"] == 64 - 6
    assert {k: model.asked[k] for k in ("temperature", "top_k", "top_p", "min_p")} == {
        "temperature": 0.0, "top_k": None, "top_p": None, "min_p": None
    }  # fmt: skip
    notes = result.stderr
    assert "note: the files have more" in notes and "Model(tiny [bold]), loaded in" in notes
    said = r"prompt: 6 tokens in [\d.]+ s .* until the first token.*; then 15 tokens in .*; 17 new tokens: the model en"
    assert re.search(said, notes), notes
    assert invoke(folder, "Hi é", "--quiet").stderr == ""


def test_text_comes_as_it_is_made_in_whole_characters(folder, model, monkeypatch):
    written = []

    class Out:
        def write(self, text):
            written.append(text)

        def flush(self):
            written.append("FLUSH")

    monkeypatch.setattr(sys, "stdout", Out())
    speech = speaking.prepare(speaking.Options(model=str(folder), prompt="x"))
    assert speech(speaking.Console(stderr=True, quiet=True)) == 0
    assert "".join(t for t in written if t != "FLUSH") == "Grüße, 日本!\n"
    assert all(len(t) <= 1 for t in written if t != "FLUSH") and written[1::2] == ["FLUSH"] * (len(written) // 2)


def test_options_reach_the_model(folder, model):
    options = ["--max-new-tokens", 3, "--temperature", 0.7, "--top-k", 5, "--top-p", 0.9, "--min-p", 0.1, "--seed", 3,
               "--dtype", "bfloat16"]  # fmt: skip
    result = invoke(folder, "x", *options)
    assert result.stdout == "Gr\ufffd\n"  # the first half of ü: all that there is of it
    assert "3 new tokens were asked for" in result.stderr
    wanted = {"max_new_tokens": 3, "temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1}
    assert {k: model.asked[k] for k in wanted} == wanted
    assert str(np.dtype(model.dtype)) == "bfloat16"
    import jax

    assert jax.random.key_data(model.asked["key"]).tolist() == jax.random.key_data(jax.random.key(3)).tolist()
    result = invoke(folder, "x", "--top-p", 0.5, "--min-p", 0.2)
    assert "--top-p, --min-p: of no effect at temperature 0" in result.stderr


def test_chat_uses_the_template_and_begins_once(folder, model):
    invoke(folder, "Hi", "--chat")
    assert model.asked["tokens"] == [[0, 2, *ids_of("Hi"), 3]]
    invoke(folder, "Hi", "--chat", "--system", "Be")
    assert model.asked["tokens"] == [[0, 4, *ids_of("Be"), 2, *ids_of("Hi"), 3]]


def test_the_prompt_may_come_from_a_pipe(folder, model):
    for text, taken in (("Hi\n", "Hi"), ("Hi", "Hi"), ("a\nb\n\n", "a\nb\n"), ("é\r\n", "é")):
        assert invoke(folder, "-", input=text.encode()).exit_code == 0
        assert model.asked["tokens"] == [[0, *ids_of(taken)]]
    result = invoke(folder, "-", input=b"\xff\xfe")
    assert result.exit_code == 2 and "standard input is no valid text" in result.stderr


def test_words_keep_the_space_in_front(folder, model):
    """What comes out goes on where the prompt ends."""
    words = {"<s>": 0, "</s>": 1, "▁Hi": 2, "▁there": 3}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="</s>"))
    made.pre_tokenizer, made.decoder = tokenizers.pre_tokenizers.Metaspace(), tokenizers.decoders.Metaspace()
    made.save(str(folder / "tokenizer.json"))
    model.says = [3, 3]
    assert invoke(folder, "Hi").stdout == " there there\n"
    assert model.asked["tokens"] == [[2]]


def test_weights_are_fetched_when_the_rest_is_right(folder, model, monkeypatch):
    asked = []

    def fetch(name, *, weights=True):
        asked.append((name, weights))
        return folder

    monkeypatch.setattr(speaking, "fetch", fetch)
    assert invoke("org/name", "x" * 99).exit_code == 2
    assert asked == [("org/name", False)]
    assert invoke("org/name", "x").exit_code == 0
    assert asked[1:] == [("org/name", False), ("org/name", True)]


def test_stop_texts_end_it(folder, model):
    result = invoke(folder, "x", "--stop", "本", "--stop", "nope")
    assert result.stdout == "Grüße, 日\n" and "a stop text came" in result.stderr
    model.says = ids_of("one\n\ntwo")
    assert invoke(folder, "x", "--stop", "\n\n").stdout == "one\n"
    # What might have been the beginning of a stop comes out when it wasn't.
    assert invoke(folder, "x", "--stop", "two!").stdout == "one\n\ntwo\n"
    model.says = ids_of("ends\n")
    assert invoke(folder, "x").stdout == "ends\n"


def test_every_stop_id_ends_it(folder, model):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 1000]}))
    model.says = [*ids_of("AB"), 7, *ids_of("C")]
    assert invoke(folder, "x").stdout == "AB\n"
    # One that the model doesn't have is no stop id.
    assert model.asked["stop_ids"] == (7, 1)


def test_ids_need_no_tokenizer(folder, model):
    (folder / "tokenizer.json").unlink()
    result = invoke(folder, "5, 6 7", "--ids")
    assert result.exit_code == 0, result.output
    assert result.stdout == " ".join(map(str, model.says[: model.says.index(1) + 1])) + "\n"
    assert model.asked["tokens"] == [[5, 6, 7]] and model.asked["allowed"] == 300 and model.asked["stop_ids"] == (1,)
    result = invoke(folder, "Hi")
    assert result.exit_code == 2 and re.search("has no tokenizer.json.*or give token ids, with --ids", result.stderr)
    for prompt, said in (("5 x", "not '5 x'"), ("300", "token id 300, and the model's are 0 to 299$"), ("-1", "id -1"),
                         ("", "the prompt is empty")):  # fmt: skip
        result = invoke("--ids", folder, "--", prompt)
        assert result.exit_code == 2 and re.search(said, result.stderr.strip()), result.stderr


def test_model_defaults_are_taken_when_asked_for(folder, model):
    path = folder / "generation_config.json"
    path.write_text(json.dumps({"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": None,
                                "repetition_penalty": 1.1, "num_beams": 1}))  # fmt: skip
    sampling = lambda: tuple(model.asked[k] for k in ("temperature", "top_k", "top_p", "min_p"))
    invoke(folder, "x")
    assert sampling() == (0.0, None, None, None)
    result = invoke(folder, "x", "--model-defaults")
    assert sampling() == (0.6, 20, 0.9, None)
    assert "also asks for repetition_penalty, which isn't done here" in result.stderr
    assert "num_beams" not in result.stderr
    invoke(folder, "x", "--model-defaults", "--temperature", 2, "--min-p", 0.3)
    assert sampling() == (2.0, 20, 0.9, 0.3)
    for settings, expected in (
        ({"temperature": 0.6, "top_p": 0.9}, (0.0, None, None, None)),  # without do_sample: the best token
        ({"do_sample": False, "temperature": 0.6}, (0.0, None, None, None)),
        ({"do_sample": True}, (1.0, None, None, None)),
        ({"do_sample": True, "top_k": 0, "top_p": 1}, (1.0, None, 1.0, None)),
    ):
        path.write_text(json.dumps(settings))
        assert invoke(folder, "x", "--model-defaults").exit_code == 0
        assert sampling() == expected
    for settings, said in (({"top_p": "high"}, "top_p is 'high'"), ({"top_k": 2.5}, "top_k is 2.5"),
                           ({"temperature": -1}, "temperature must be 0 or more, got -1")):  # fmt: skip
        path.write_text(json.dumps({"do_sample": True, **settings}))
        result = invoke(folder, "x", "--model-defaults")
        assert result.exit_code == 2 and "generation_config.json" in result.stderr and said in result.stderr
    path.unlink()
    assert "--model-defaults changes nothing" in invoke(folder, "x", "--model-defaults").stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere", "x"], "'nowhere' is neither a folder that exists nor a name on the Hub"),
        (["llama-3.1-8b", "x"], "is a configuration without weights"),
        (["MODEL", "x", "--dtype", "float8"], "dtype 'float8' is not one of stored, float32, bfloat16"),
        (["MODEL", "x", "--max-new-tokens", "0"], "max_new_tokens must be 1 or more, got 0"),
        (["MODEL", "x", "--temperature", "-1"], "temperature must be 0 or more, got -1"),
        (["MODEL", "x", "--temperature", "nan"], "temperature must be 0 or more, got nan"),
        (["MODEL", "x", "--temperature", "inf"], "temperature must be 0 or more, got inf"),
        (["MODEL", "x", "--top-k", "0"], "top_k must be 1 or more, got 0"),
        (["MODEL", "x", "--top-p", "0"], "top_p must be more than 0 and at most 1, got 0"),
        (["MODEL", "x", "--top-p", "1.5"], "top_p must be more than 0"),
        (["MODEL", "x", "--min-p", "2"], "min_p must be between 0 and 1"),
        (["MODEL", "x", "--system", "Be"], "--system goes with --chat"),
        (["MODEL", "5", "--ids", "--chat"], "--chat goes with text, not --ids"),
        (["MODEL", "5", "--ids", "--stop", "a"], "--stop goes with text, not --ids"),
        (["MODEL", "x", "--stop", ""], "an empty text can't be stopped at"),
        (["MODEL", "x" * 64], "65 tokens, which with 1 new ones is more than the 64 positions the model was made for"),
        (["MODEL", "x" * 50, "--max-new-tokens", "20"], "take a shorter prompt, or at most 13 new tokens"),
        (["MODEL", "\udcff"], "is no valid text"),
        (["EMPTY", "x"], "config.json"),
        (["BARE", "x"], "has no tokenizer.json"),
        (["SMALL", "é"], "the model's are 0 to 99: the tokenizer belongs to another model"),
        (["MODEL/config.json", "x"], "is a file: give the model's folder"),
    ],
)
def test_bad_input_is_one_line_before_anything_is_loaded(arguments, said, folder, model, tmp_path, monkeypatch):
    def load(*args, **kwargs):
        raise AssertionError("the weights are read")

    monkeypatch.setattr(pretrained, "load", load)
    monkeypatch.chdir(tmp_path)
    folder.rename("MODEL")
    for name, files in (("EMPTY", ()), ("BARE", ("config.json",)), ("SMALL", ("config.json", "tokenizer.json"))):
        (tmp_path / name).mkdir()
        for file in files:
            (tmp_path / name / file).write_bytes((tmp_path / "MODEL" / file).read_bytes())
    (tmp_path / "SMALL" / "config.json").write_text(json.dumps(CONFIG | {"vocab_size": 100}))
    result = invoke(*arguments)
    assert result.exit_code == 2, result.output
    assert said in result.stderr and result.stdout == ""
    assert len(result.stderr.strip().splitlines()) == 1 and "Traceback" not in result.stderr


def test_errors_are_said_even_when_quiet(folder, monkeypatch):
    def load(*args, **kwargs):
        raise ValueError("weights [b]broken[/b]")

    monkeypatch.setattr(pretrained, "load", load)
    result = invoke(folder, "x", "--quiet")
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", "error: weights [b]broken[/b]\n")


def test_what_is_there_is_shown_when_it_is_interrupted(folder, model):
    model.says = [*ids_of("Gr"), ids_of("ü")[0], KeyboardInterrupt()]
    result = invoke(folder, "x", "--stop", "r\ufffdx")
    assert result.exit_code == 130
    assert result.stdout == "Gr\ufffd\n" and "interrupted" in result.stderr and "Traceback" not in result.output
    model.says = [KeyboardInterrupt()]
    result = invoke(folder, "x")
    assert result.exit_code == 130 and result.stdout == "" and "interrupted; no token was made" in result.stderr


def test_a_reader_that_goes_away_ends_it(folder, model, monkeypatch):
    class Out:
        def write(self, text):
            raise BrokenPipeError

        def flush(self):
            pass

        def fileno(self):
            raise OSError

    monkeypatch.setattr(sys, "stdout", Out())
    speech = speaking.prepare(speaking.Options(model=str(folder), prompt="x"))
    assert speech(speaking.Console(stderr=True, quiet=True)) == 0


# From here on with a real model, as far as random weights make one.


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """A folder with all that `overspill generate` needs."""
    from safetensors.numpy import save_file

    made = tmp_path_factory.mktemp("real")
    byte_tokenizer().save(str(made / "tokenizer.json"))
    # No stop id: it goes on for as long as it is asked to.
    config = CONFIG | {"eos_token_id": None, "max_position_embeddings": 100_000}
    (made / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(5)
    d, f, kv = 16, 24, 8
    layer = {"input_layernorm": (d,), "post_attention_layernorm": (d,), "self_attn.q_proj": (d, d),
             "self_attn.k_proj": (kv, d), "self_attn.v_proj": (kv, d), "self_attn.o_proj": (d, d),
             "mlp.gate_proj": (f, d), "mlp.up_proj": (f, d), "mlp.down_proj": (d, f)}  # fmt: skip
    shapes = {f"model.layers.{i}.{name}.weight": shape for i in range(2) for name, shape in layer.items()}
    shapes |= {"model.embed_tokens.weight": (300, d), "model.norm.weight": (d,), "lm_head.weight": (300, d)}
    weights = {n: rng.normal(len(s) == 1, 0.5, s).astype(np.float32) for n, s in shapes.items()}
    # What the tokenizer doesn't have is the most probable of all, and mustn't be taken.
    weights["lm_head.weight"][261:] *= 20
    save_file(weights, made / "model.safetensors")
    return made


def test_a_real_model_says_what_its_logits_say(real):
    import jax

    model = pretrained.load(real)
    # One shape for all lengths: what comes later is seen by nothing before it.
    logits_of = jax.jit(lambda model, tokens: model(tokens)[0])
    ids = [0, *ids_of("Hi")]
    for _ in range(24):
        padded = np.zeros((1, 32), np.int32)
        padded[0, : len(ids)] = ids
        logits = np.asarray(logits_of(model, padded))[len(ids) - 1]
        assert logits.argmax() >= 261 or len(ids) > 3
        ids.append(int(logits[:261].argmax()))
    decode = byte_tokenizer().decode
    expected = decode(ids).removeprefix(decode(ids[:3]))
    options = ["--max-new-tokens", 24, "--dtype", "float32"]
    result = invoke(real, "Hi", *options)
    assert result.exit_code == 0, result.output
    assert result.stdout == expected + "\n" * (not expected.endswith("\n"))
    assert "24 new tokens were asked for" in result.stderr
    raw = invoke(real, "0 " + " ".join(map(str, ids_of("Hi"))), "--ids", "--max-new-tokens", 1).stdout
    assert int(raw) >= 261  # ids without a tokenizer: all that the model has


def test_drawing_depends_on_the_seed_alone(real):
    options = ["Hi", "--max-new-tokens", 12, "--temperature", 1.5, "--top-k", 200, "--top-p", 0.95, "--quiet"]
    texts = [invoke(real, *options, "--seed", seed).stdout for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


COMMAND = [sys.executable, "-c", "from overspill.zoo.command import main; main()", "generate"]


def test_interrupt_ends_it_cleanly(real):
    command = [*COMMAND, str(real), "Hi", "--max-new-tokens", "90000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        begun = process.stdout.read(16)
        process.send_signal(signal.SIGINT)
        rest, notes = process.communicate(timeout=120)
    assert process.returncode == 130, notes
    assert len(begun) == 16 and (begun + rest).endswith(b"\n")
    assert b"interrupted" in notes and b"Traceback" not in notes and b"tokens/s" in notes


def test_a_pipe_that_closes_ends_it_cleanly(real):
    command = [*COMMAND, str(real), "Hi", "--max-new-tokens", "90000"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
        process.stdout.read(4)
        process.stdout.close()
        notes = process.stderr.read()
    assert process.returncode == 0, notes
    assert b"nobody reads on" in notes and b"Traceback" not in notes and b"Exception" not in notes
