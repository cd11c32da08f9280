"""Schedules in which devices of one process read rows and exchange them, as those of several processes do."""

from shardplan.checkpoint.transfer.schedule import Schedule, exchange_strategies
from shardplan.checkpoint.transfer.transfer import ReadStrategy, make_transfers


def make_exchange_schedule(requests, sources, mesh, limits, speeds):
    """A schedule with as many collectives as possible."""
    transfers = []
    for path, request in requests.items():
        shape, spec = request.view.shape, request.spec
        strategies = [ReadStrategy(spec), *exchange_strategies(shape, spec, mesh)]
        strategy = max(strategies, key=lambda each: len(each.collectives))
        transfers += make_transfers(path, shape, strategy, request.dtype.itemsize, mesh, limits, request.placed_bytes)
    return Schedule(mesh, tuple(transfers))
