"""The programs that the factors of the cost model are fitted to: plans of a few models for every generation."""

from dataclasses import replace

from bench_planner import TENSOR_PARALLEL, build, load

from shardplan.experts.method import ExpertMethod
from shardplan.hardware.generations import GENERATIONS
from shardplan.model.model_class import DECODER, LEVANTER
from shardplan.search.given_plan import plan_given_mappings
from shardplan.search.result.compiler_options import TILE_MEMORY
from shardplan.verify.case import Case

CASES = (
    # step, model, devices, sequences, replica x data x model, name in STORED of the additional parameter sharding
    "eval llama-3.1-8b 64 64 1x64x1 embed", "eval llama-3.1-8b 32 16 1x16x2 outputs",
    "eval qwen3-32b 64 16 1x8x8 nothing", "eval mistral-7b-v0.3 32 32 2x16x1 both",
    "eval llama-3.1-70b 64 16 1x8x8 embed", "eval mixtral-8x7b 64 16 1x16x4 outputs",
    "train llama-3.1-8b 32 32 1x32x1 embed", "train mixtral-8x7b 64 16 1x16x4 outputs",
    "train qwen3-32b 64 64 1x32x2 outputs",
    "eval mixtral-8x7b 32 32 4x8x1 experts", "eval qwen3-30b-a3b 32 32 2x16x1 experts",
    "train qwen3-30b-a3b 32 32 1x32x1 experts",
)  # fmt: skip
"""Plans that are compiled for every generation: tensor parallelism of 1, 2, 4 and 8; parameters gathered over the whole
mesh (64 and 32 devices), over 8 and 16, along one dimension, along two at once, and not at all; three of them train,
and two have experts by Levanter's own blocks. Three have experts sharded over 8, 16 and 32 devices, by the decoder.
Plans that do not fit a generation are left out."""
TRAININGS = (
    "train llama-3.1-8b 32 192 1x32x1 embed", "train llama-2-13b 64 256 1x64x1 embed",
    "train llama-3.1-70b 128 256 1x128x1 embed",
)  # fmt: skip
"""More plans, with 8,192 to 24,576 tokens a device, to which only the factors of trainings are fitted."""
OUTPUTS = ("mlp", "head_size", "vocab")
STORED = {
    "nothing": {},
    "embed": {"embed": ["data"]},
    "outputs": {axis: ["data"] for axis in OUTPUTS},
    "both": {"embed": ["data"], **{axis: ["replica"] for axis in OUTPUTS}},
    "experts": {"embed": ["data"]},
}
"""Name -> mesh axes that shard parameters beyond the compute mapping."""
FITTED = tuple(name for name, row in GENERATIONS.items() if row.factors_of is None)
"""Generations that have factors of their own."""
VMEM_KIB = {"v5e": 65536, "v5p": 65536, "v6e": 98304, "tpu7x": 49152}
"""Generation -> vector memory that one operation may use in programs with larger tiles, KiB. With more, an operation
holds larger tiles of matmuls there, and reads operands from HBM less often (docs/log.md has what each gained, and what
else was tried); on v4 more than the compiler's own limit changes nothing."""


def make_case(text: str, generation: str) -> Case:
    """The case for one line of CASES."""
    kind, model, devices, batch, sizes, stored = text.split()
    chips = int(devices) // GENERATIONS[generation].devices_per_chip
    slice_name = f"{generation}-{chips * GENERATIONS[generation].name_counts_per_chip}"
    is_sharded = stored == "experts"
    config = load(model, slice_name, kind, int(batch), model_class=DECODER if is_sharded else LEVANTER)
    hf_config, built = build(config)
    mesh = dict(zip(("replica", "data", "model"), map(int, sizes.split("x")), strict=True))
    compute = {"batch": [axis for axis in ("replica", "data") if mesh[axis] > 1]}
    compute |= {axis: ["model"] for axis in TENSOR_PARALLEL if mesh["model"] > 1}
    if is_sharded:
        compute["experts"] = ["data"]
    params = {axis: [*compute.get(axis, ()), *mesh_axes] for axis, mesh_axes in STORED[stored].items()}
    experts = ExpertMethod() if is_sharded else None
    plan = plan_given_mappings(config, built, mesh, compute, {**compute, **params}, experts=experts)
    return Case(f"{slice_name} {text}", plan, hf_config, options=plan.compiler_options)


def make_cases() -> list[Case]:
    """All programs: those of every plan with the compiler's own tiles, and of dense models with larger ones as well."""
    cases = []
    for text in (*CASES, *TRAININGS):
        for generation in FITTED:
            case = make_case(text, generation)
            own = {name: value for name, value in case.options.items() if name != TILE_MEMORY}
            cases.append(replace(case, options=own))
            if generation in VMEM_KIB and "num_experts_per_tok" not in case.hf_config:
                options = {**own, TILE_MEMORY: str(VMEM_KIB[generation])}
                cases.append(replace(case, label=f"{case.label}, larger tiles", options=options))
    return cases
