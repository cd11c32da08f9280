# %% [markdown]
# # Extraction: what a model has memorised
#
# How probable does a model find a text, word by word? A window has a prefix, which is given, and a suffix, whose
# probability p_z is measured ([Cooper et al., 2025](https://arxiv.org/abs/2505.12546)). Here a small Llama memorises
# one text, and half of another one, and `evaluate` finds both again. The same call evaluates 405B on a pod.

# %%
import os

os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}

# %% [markdown]
# ## Two texts
#
# The Zen of Python is in the training data as a whole, of the licence of this repository only the first half.

# %%
import this
from pathlib import Path

zen = "".join(map(this.d.get, this.s, this.s))
licence = Path("../LICENSE").read_text()[:1600]

# %% [markdown]
# A byte-level tokenizer of 512 tokens, trained on both:

# %%
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

tokenizer = Tokenizer(models.BPE())
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
alphabet = pre_tokenizers.ByteLevel.alphabet()
tokenizer.train_from_iterator(
    [zen, licence], trainers.BpeTrainer(vocab_size=512, initial_alphabet=alphabet, show_progress=False)
)
learned = tokenizer.encode(zen + licence[: len(licence) // 2]).ids
print(len(learned), "tokens to learn")

# %% [markdown]
# ## A model that learns them
#
# A Llama with two layers, Levanter's own loss, and Adam:

# %%
import equinox as eqx
import haliax as hax
import jax
import numpy as np
import optax
import transformers
from levanter.layers.attention import AttentionMask
from levanter.models.llama import LlamaConfig, LlamaLMHeadModel
from levanter.models.loss import next_token_loss

hf_config = transformers.LlamaConfig(
    vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64,
)  # fmt: skip
model = LlamaLMHeadModel.init(hax.Axis("vocab", 512), LlamaConfig.from_hf_config(hf_config), key=jax.random.PRNGKey(0))
optimizer = optax.adam(6e-3)


def loss_of(model, tokens):
    stream = model.activations(tokens, AttentionMask.causal())
    logits = hax.dot(stream, model.get_lm_head(), axis=model.Embed)
    return next_token_loss(model.Pos, model.Vocab, logits, tokens).scalar()


@eqx.filter_jit
def train_step(model, state, tokens):
    loss, gradients = eqx.filter_value_and_grad(loss_of)(model, tokens)
    updates, state = optimizer.update(gradients, state)
    return eqx.apply_updates(model, updates), state, loss


draw, state = np.random.default_rng(0), optimizer.init(eqx.filter(model, eqx.is_array))
for _ in range(80):
    starts = draw.integers(0, len(learned), 16)
    windows = np.stack([np.roll(learned, -start)[: model.Pos.size] for start in starts])
    model, state, loss = train_step(model, state, hax.named(windows, ("batch", model.Pos)))
print("loss below 0.3 nats per token:", bool(loss < 0.3))

# %% [markdown]
# `save_pretrained` writes it as a Hugging Face checkpoint, with the tokenizer beside it.

# %%
import json
import shutil

from shardplan import save_pretrained

folder = Path("../build/notebooks/extraction")
shutil.rmtree(folder, ignore_errors=True)
files = {"tokenizer.json": tokenizer.to_str().encode()}
save_pretrained(model, str(folder / "model"), hf_config.to_dict(), extra_files=files)
rows = [{"id": "zen", "text": zen}, {"id": "licence", "text": licence}]
_ = (folder / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
# %% [markdown]
# ## Evaluate
#
# `evaluate` takes the configuration of `shardplan eval`: it plans, streams the checkpoint into the plan, scores every
# window, and writes results, plots and pages. Windows of 30 given and 20 measured tokens start at every second token.

# %%
from shardplan import evaluate

summary = evaluate(
    model={"ref": str(folder / "model")},
    hardware={"slice": "cpu-8"},
    workload={"param_dtype": "float32", "compute_dtype": "float32"},
    data={"path": str(folder / "texts.jsonl")},
    task={"kind": "extraction", "prefix": 30, "suffix": 20, "stride": 2},
    output=str(folder / "results"),
)
for name, text in summary["texts"].items():
    covered = text["coverage"]["0.1"]
    print(f"{name:8} {text['windows']} windows; those with p_z of at least 10% cover {covered:.1f} of the characters")

# %% [markdown]
# All of the poem, and the half of the licence that the model has read. The plot of the licence shows where it ends:

# %%
from IPython.display import Image

Image(folder / "results" / "plots" / "licence.png", width=800)

# %% [markdown]
# ## Window by window
#
# `windows.parquet` has a row for each window, with the log-probability and the rank of every token of the suffix. Rank
# 0 in all of them means that the model would write the suffix by itself.

# %%
import pyarrow.parquet as pq

windows = pq.read_table(folder / "results" / "windows.parquet").to_pylist()
window = windows[20]
print("given    ", repr(zen[window["start"] : window["suffix_start"]]))
print("measured ", repr(zen[window["suffix_start"] : window["end"]]))
print("p_z above one half:", np.exp(sum(window["log_prob"])) > 0.5)
print("written by the model itself:", not any(window["rank"]))

# %% [markdown]
# The page of a text shades every character by the most probable window that covers it:

# %%
import html

from IPython.display import HTML

page = (folder / "results" / "pages" / "licence.html").read_text()
HTML(f'<div><iframe srcdoc="{html.escape(page)}" width="100%" height="420"></iframe></div>')
