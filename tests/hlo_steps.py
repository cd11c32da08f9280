"""Steps of hand-written modules as tests time them.

A v4 core runs 1.05e9 cycles per second, a link transfers 4.5e10 bytes per second in each direction with a latency of a
microsecond, and the network between slices transfers 6.25e9 bytes per second. The 4 devices of v4-8 are a square
without wraparound: each device has two links, as in a ring, and opposite corners are two hops apart.
"""

from dataclasses import replace

from shardplan.hardware import parse_slice
from shardplan.verify.hlo.collectives import Network
from shardplan.verify.hlo.kernels import ALL_WORK, KernelWork
from shardplan.verify.hlo.parser import parse
from shardplan.verify.hlo.timing import Timing, model_step

CLOCK, RING, LINK, NETWORK, HBM, FLOPS = 1.05e9, 9e10, 4.5e10, 6.25e9, 1.2e12, 2.75e14
MS, HOP = 1e-3, 1e-6
GATHER = 1 * MS + 2 * HOP
"""Seconds of `gather` among four devices."""
COMPUTATIONS = """
%work (a: f32[]) -> f32[] {
  ROOT %a = f32[] parameter(0)
}

%begin (b: f32[7500000]) -> f32[30000000] {
  %b = f32[7500000] parameter(0)
  ROOT %ag.1 = f32[30000000] all-gather(%b), channel_id=9, replica_groups={{0,1,2,3}}, dimensions={0}
}

%on (c: f32[7500000]) -> f32[30000000] {
  %c = f32[7500000] parameter(0)
  ROOT %ag.2 = f32[30000000] all-gather(%c), channel_id=9, replica_groups={{0,1,2,3}}, dimensions={0}
}

%end (d: f32[7500000]) -> f32[30000000] {
  %d = f32[7500000] parameter(0)
  ROOT %ag.3 = f32[30000000] all-gather(%d), channel_id=9, replica_groups={{0,1,2,3}}, dimensions={0}
}

%begin_other (e: f32[7500000]) -> f32[30000000] {
  %e = f32[7500000] parameter(0)
  ROOT %ag.4 = f32[30000000] all-gather(%e), channel_id=9, replica_groups={{0,1,2,3}}, dimensions={0}, CHAIN
}

%end_other (f: f32[7500000]) -> f32[30000000] {
  %f = f32[7500000] parameter(0)
  ROOT %ag.5 = f32[30000000] all-gather(%f), channel_id=9, replica_groups={{0,1,2,3}}, dimensions={0}, CHAIN
}

%body (p: (s32[], s32[], f32[7500000])) -> (s32[], s32[], f32[7500000]) {
  %p = (s32[], s32[], f32[7500000]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %n = s32[] get-tuple-element(%p), index=1
  %y = f32[7500000] get-tuple-element(%p), index=2
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  IN_BODY
  ROOT %t = (s32[], s32[], f32[7500000]) tuple(%next, %n, %y)
}

%condition (q: (s32[], s32[], f32[7500000])) -> pred[] {
  %q = (s32[], s32[], f32[7500000]) parameter(0)
  %j = s32[] get-tuple-element(%q), index=0
  %m = s32[] get-tuple-element(%q), index=1
  ROOT %less = pred[] compare(%j, %m), direction=LT
}
""".replace("CHAIN", 'frontend_attributes={chain_id="3"}')


def work(name: str, milliseconds: float, calls: str = "work") -> str:
    """A fusion that occupies the core for `milliseconds`."""
    cycles = round(milliseconds * MS * CLOCK)
    config = f'{{"window_config":{{"estimated_cycles":"{cycles}"}}}}'
    return f"%{name} = f32[] fusion(%x), kind=kLoop, calls=%{calls}, backend_config={config}"


def gather(name: str, suffix: str = "", groups: str = "{{0,1,2,3}}") -> str:
    """An all-gather of 30 MB per device: among four 90 MB at 90 GB/s take 1 ms; pairs with one link take 2/3 ms."""
    return f"%{name} = f32[30000000] all-gather{suffix}(%x), channel_id=1, replica_groups={groups}, dimensions={{0}}"


LOOP = """%zero = s32[] constant(0)
  %limit = s32[] constant(5)
  %tuple = (s32[], s32[], f32[7500000]) tuple(%zero, %limit, %x)
  %loop = (s32[], s32[], f32[7500000]) while(%tuple), condition=%condition, body=%body"""


def step(*lines: str, body: str = "", sizes: tuple[int, ...] = (1, 4, 1), slice_name: str = "v4-8") -> Timing:
    """Timing of an entry computation with `lines`, which may use %x: f32[7500000], on a v4 slice."""
    entry = "\n  ".join(lines)
    text = COMPUTATIONS.replace("IN_BODY", body) + (
        "\nENTRY %main (x: f32[7500000]) -> f32[] {\n  %x = f32[7500000] parameter(0)\n  "
        f"{entry}\n  ROOT %result = f32[] constant(0)\n}}\n"
    )
    return timing(text, slice_name, sizes)


def timing(
    text: str,
    slice_name: str,
    sizes: tuple[int, ...],
    kernel_work: KernelWork = ALL_WORK,
    hbm_bandwidth: float | None = None,
) -> Timing:
    hardware = parse_slice(slice_name)
    if hbm_bandwidth is not None:
        hardware = replace(hardware, generation=replace(hardware.generation, hbm_bandwidth=hbm_bandwidth))
    mesh = dict(zip(("replica", "data", "model"), sizes, strict=True))
    slices = [i // (hardware.devices // hardware.slices) for i in range(hardware.devices)]
    return model_step(parse(text), Network(mesh, hardware, slices), hardware, kernel_work)


def uses_of(timing: Timing) -> list[tuple]:
    """Kind, mesh axes, bytes, form and executions of every collective."""
    return [(u.transfer.kind, u.transfer.mesh_axes, u.transfer.bytes, u.form, u.count) for u in timing.uses]
