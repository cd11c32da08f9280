# %% [markdown]
# # Native Sparse Attention
#
# Facts are hidden in 8,192 tokens, and questions about them stand at the end. A query of [Native Sparse
# Attention](../docs/explanation/native-sparse-attention.md) reads a summary of every block of tokens, a window, and the
# tokens of a few selected blocks. Here a small model learns to answer, once with dense and once with sparse attention,
# on eight virtual devices. Then its selection is drawn.

# %%
import os

os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}

# %% [markdown]
# ## The task
#
# Each of four names has one of four values. A fact is one token, which stands for a name with its value, somewhere in
# the noise. A question is the token of a name, and the next token is its value.

# %%
import numpy as np

NOISE, NAMES, VALUES = 12, 4, 4
FACT = NOISE
QUESTION = FACT + NAMES * VALUES
ANSWER = QUESTION + NAMES
VOCAB = ANSWER + VALUES


def draw_texts(draw, batch, length, questions):
    """Return tokens [batch, length], and the positions of the facts that are asked for [batch, questions]."""
    tokens = draw.integers(0, NOISE, (batch, length))
    text = length - 2 * questions
    places = draw.permuted(np.tile(np.arange(text), (batch, 1)), axis=1)[:, :NAMES]
    values = draw.integers(0, VALUES, (batch, NAMES))
    np.put_along_axis(tokens, places, FACT + np.arange(NAMES) * VALUES + values, axis=1)
    names = draw.permuted(np.tile(np.arange(questions) % NAMES, (batch, 1)), axis=1)
    tokens[:, text::2] = QUESTION + names
    tokens[:, text + 1 :: 2] = ANSWER + np.take_along_axis(values, names, axis=1)
    return tokens, np.take_along_axis(places, names, axis=1)


tokens, places = draw_texts(np.random.default_rng(0), batch=1, length=32, questions=4)
print("text          ", *tokens[0])
print("facts asked at", *places[0])

# %% [markdown]
# ## Two models
#
# Both are a Llama with one layer. The sparse one selects 8 blocks of 8 tokens, of the 1,024 blocks of a long text: the
# first one, its own and the one before it, and five that it chooses. The base of the rotary embedding is so large that
# most channels hardly turn; otherwise distances that are not in training would confuse either model.

# %%
import json
from pathlib import Path

folder = Path("../build/notebooks/native-sparse-attention")
folder.mkdir(parents=True, exist_ok=True)
sizes = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 8192, "rope_theta": 1e16,
}  # fmt: skip
sparse = {"block": 4, "stride": 4, "selection_block": 8, "selected": 8, "window": 8, "compression": "mean"}
configs = {
    "dense": {"model_type": "llama", **sizes},
    "sparse": {"model_type": "llama_nsa", **sizes, "native_sparse_attention": sparse},
}
for name, config in configs.items():
    (folder / f"{name}.json").write_text(json.dumps(config))

# %% [markdown]
# ## Training
#
# Plans for eight devices shard the batch and the parameters. Both models are of shardplan's decoder, which also shards
# positions. Texts are short at first, and get longer: 64 tokens,
# then 256, then 1,024. Training at 8,192 tokens would take too long on a CPU: the models see such texts in the test
# alone.

# %%
from shardplan import load_config, make_mesh, make_plan
from shardplan.execution import specialize
from shardplan.model.model_class import DECODER
from shardplan.search.make_plan import model_from_config


def plan_model(name, pin=(), **workload):
    """Return the plan of a workload, and the model as it runs under the plan."""
    workload |= {"param_dtype": "float32", "compute_dtype": "float32", "gradient_checkpointing": "save_all"}
    config = load_config(
        model={"config": str(folder / f"{name}.json"), "levanter_class": DECODER}, hardware={"slice": "cpu-8"},
        mesh={"data": 8}, pin=list(pin), workload=workload,
    )  # fmt: skip
    plan = make_plan(config)
    return plan, specialize(model_from_config(config), plan)


plans = {name: plan_model(name, kind="train", batch=64, position=64, pin=["batch=data"]) for name in configs}
for name, (plan, _) in plans.items():
    print(f"{name:7}", plan.compute_mapping, plan.param_mapping)

# %% [markdown]
# The loss is that of the tokens after questions; all others are noise.

# %%
import equinox as eqx
import haliax as hax
import jax
import optax

STAGES = ((64, 32, 200), (256, 16, 80), (1024, 8, 40))
"""Tokens of a text, texts of a batch, steps."""
steps = sum(count for _, _, count in STAGES)
optimizer = optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.adam(optax.warmup_cosine_decay_schedule(0.0, 1e-2, 10, steps, 1e-3), b2=0.98),
)


def loss_of(model, tokens, questions):
    """Return the mean loss in nats of the answers to the last questions of texts int[batch, position]."""
    stream = model.activations(tokens)
    asked = hax.slice(stream, "position", start=tokens.axis_size("position") - 2 * questions, length=2 * questions)
    logits = hax.dot(asked, model.get_lm_head(), axis=model.Embed).rearrange(("batch", "position", "vocab")).array
    answers = tokens.array[:, -2 * questions :]
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, ::2], answers[:, 1::2]).mean()


def train_step(model, state, tokens, questions):
    """Return the model and the state of the optimizer after a step, and the loss before it."""
    loss, gradients = eqx.filter_value_and_grad(loss_of)(model, tokens, questions)
    updates, state = optimizer.update(gradients, state)
    return eqx.apply_updates(model, updates), state, loss


def train(plan, planned):
    """Return the trained model, and its loss at every step."""
    draw, losses = np.random.default_rng(1), []
    with hax.partitioning.set_mesh(make_mesh(plan)):
        init = hax.named_jit(planned.config.build, out_axis_resources=plan.param_mapping)
        model = init(planned.vocab, key=jax.random.PRNGKey(0))
        state = optimizer.init(eqx.filter(model, eqx.is_array))
        step = hax.named_jit(train_step, axis_resources=plan.compute_mapping, out_axis_resources=plan.param_mapping)
        for length, batch, count in STAGES:
            for _ in range(count):
                tokens, _ = draw_texts(draw, batch, length, questions=16)
                model, state, loss = step(model, state, hax.named(tokens, ("batch", "position")), 16)
                losses.append(float(loss))
    return model, losses


trained = {name: train(plan, model) for name, (plan, model) in plans.items()}

# %%
import matplotlib.pyplot as plt

BLUE, ORANGE = "#0072B2", "#D55E00"
colours = dict(zip(configs, (BLUE, ORANGE), strict=True))
figure, axes = plt.subplots(figsize=(8, 3), layout="constrained")
for name, (_, losses) in trained.items():
    axes.plot(losses, color=colours[name], label=name, linewidth=1)
axes.axhline(np.log(VALUES), color="grey", linestyle=":", label="a guess")
for step in np.cumsum([count for _, _, count in STAGES])[:-1]:
    axes.axvline(step, color="grey", linewidth=0.5)  # longer texts from here on
axes.set(xlabel="step", ylabel="loss, nats per answer", ylim=0)
_ = axes.legend(frameon=False)

# %% [markdown]
# ## 8,192 tokens
#
# Now eight devices share one text. The plan chooses how: every device computes its own queries, and receives the halos
# of windows and blocks, and all keys and values. `step_program` is the program that `shardplan eval` runs; `rank` is 0
# where the model finds the right token the most probable one.

# %%
from shardplan.execution import step_program

LENGTH, TEXTS = 8192, 4
long_plans = {name: plan_model(name, kind="score", batch=1, position=LENGTH, pin=["position=data"]) for name in configs}
for name, (plan, _) in long_plans.items():
    print(f"{name:7}", plan.attention.strategy, plan.attention.kernel, "over", plan.attention.ring, "devices")

# %%
texts, places = draw_texts(np.random.default_rng(2), TEXTS, LENGTH, NAMES)
texts = texts.astype(np.int32)
questions = np.arange(LENGTH - 2 * NAMES, LENGTH, 2)


def place(tree, like):
    """Return the arrays of a tree in the shardings of another one."""
    arrays = dict(jax.tree_util.tree_leaves_with_path(tree))
    return jax.tree_util.tree_map_with_path(lambda path, each: jax.device_put(arrays[path], each.sharding), like)


def answered(name):
    """Return whether each question has the right answer, bool[text, question]."""
    plan, planned = long_plans[name]
    program = step_program(planned, plan, make_mesh(plan))
    score = program.compile(plan.compiler_options)
    model, right = place(trained[name][0], program.arguments[0]), []
    for text in texts:
        tokens = place(hax.named(text[None], ("batch", "position")), program.arguments[1])
        right.append(np.asarray(score(model, tokens).rank.array)[0, questions] == 0)
    return np.stack(right)


right = {name: answered(name) for name in configs}
for name, each in right.items():
    print(f"{name:7} answers more than half of the questions: {each.mean() > 0.5}")

# %% [markdown]
# ## What the questions select
#
# The layer by itself returns its selection, under the same plan. A dot is a block that a question selects: blue if the
# question chose it, grey if every query selects such a block. The circle is the block of the fact.

# %%
from shardplan.decoder import SelectedMethod


def attend(model, tokens):
    """Return the output of the only layer's attention, with its selection and statistics."""
    layer = model.segments[0].unstacked()[0].layers[0]
    stream = layer.attention_norm(model.embedding.take(model.Vocab, tokens))
    return layer.self_attn.attention(stream, SelectedMethod.GATHERED_BLOCKS, with_details=True)


plan, _ = long_plans["sparse"]
with hax.partitioning.set_mesh(make_mesh(plan)):
    attend_sharded = hax.named_jit(attend, axis_resources=plan.compute_mapping)
    details = [attend_sharded(trained["sparse"][0], hax.named(text[None], ("batch", "position"))) for text in texts]
blocks = np.stack([np.asarray(each.blocks.array)[0, :, 0] for each in details])
blocks.shape  # text, position, selected block

# %%
figure, axes = plt.subplots(figsize=(9, 2.6), layout="constrained")
own = LENGTH // sparse["selection_block"] - 1
for row, (question, fact) in enumerate(zip(questions, places[0], strict=True)):
    is_forced = np.isin(blocks[0, question], [0, own - 1, own])
    for chosen, colour in ((blocks[0, question][~is_forced], BLUE), (blocks[0, question][is_forced], "grey")):
        axes.scatter(chosen, np.full(len(chosen), row), s=14, color=colour)
    axes.scatter(fact // sparse["selection_block"], row, s=130, facecolor="none", edgecolor=ORANGE)
axes.set(xlabel="block of 8 tokens", yticks=range(NAMES), ylim=(-0.6, NAMES - 0.4), xlim=(-15, own + 15))
_ = axes.set_yticks(range(NAMES), [f"question {row + 1}" for row in range(NAMES)])

# %% [markdown]
# A guess answers a quarter of them. In all texts together:

# %%
fact_blocks = places // sparse["selection_block"]
found = (blocks[:, questions] == fact_blocks[:, :, None]).any(axis=-1)
print(f"more than half of the questions select the block of their fact: {found.mean() > 0.5}")
print(f"all questions that do are answered: {right['sparse'][found].all()}")
print(f"of {own - 2} blocks a question chooses {sparse['selected'] - 3}, {(sparse['selected'] - 3) / (own - 2):.1%}")

# %% [markdown]
# And the choices of all queries of one text. Every 32nd query is a row, and grey lines are blocks with a fact. The
# title has the counts of all texts.

# %%
rows = np.arange(0, LENGTH, 32)
figure, axes = plt.subplots(figsize=(9, 4), layout="constrained")
counts = f"dense answers {right['dense'].sum()}, sparse {right['sparse'].sum()}"
axes.set_title(f"Of {found.size} questions {counts}; {found.sum()} select the block of their fact")
for fact in fact_blocks[0]:
    axes.axvline(fact, color="lightgrey", linewidth=3)
axes.scatter(blocks[0, rows].ravel(), np.repeat(rows, sparse["selected"]), s=1, color=BLUE)
_ = axes.set(xlabel="block of 8 tokens", ylabel="query", xlim=(-5, own + 5), ylim=(LENGTH, 0))

# %% [markdown]
# ## Statistics
#
# The number of keys in the selected branch depends on no weight. So the first three figures are those of a formula, for
# every model; they prove that causality and the number of blocks are right.

# %%
from shardplan.decoder.parts.attention.sparse.statistics import closed_form, figures

attention = long_plans["sparse"][1].config.segments[0].layers[0].sparse_attention.sizes
statistics = [figures(attention, each.sums) for each in details]
for name, expected in closed_form(attention, LENGTH).items():
    print(f"{name:10} {statistics[0][name]:.6g}, by the formula {expected:.6g}")

# %% [markdown]
# Training has made the others: the mean gate of each branch, and the shares of importance and of attention that lie
# outside the blocks which every query selects.

# %%
learned = {
    "gate, compressed": "gate_mean_cmp", "gate, selected": "gate_mean_slc", "gate, window": "gate_mean_win",
    "importance of chosen blocks": "free_importance", "attention to chosen blocks": "free_attention",
    "choices shared with the next query": "jaccard_next_query",
}  # fmt: skip
means = [np.mean([each[name] for each in statistics]) for name in learned.values()]
figure, axes = plt.subplots(figsize=(8, 2.4), layout="constrained")
axes.bar_label(axes.barh([*learned], means, color=BLUE), fmt="%.2f", padding=3)
axes.invert_yaxis()
_ = axes.set(xlim=(0, 1.1))
