"""The tier on vLLM's own interface of secondary tiers. With VALKEY_TEST_URL, on that server or cluster, over RDMA and TCP."""

import os
import time
from types import SimpleNamespace

import numpy
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: apps/python/README.md says how it was tried")

from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

from valkey_rdma import Client, serve_embedded
from valkey_rdma.vllm_landing import LandingTierManager

REAL = os.environ.get("VALKEY_TEST_URL", "")
CHUNKS, SIZE = 8, 2 << 20
REQUEST = ReqContext(req_id="one")
# Of this run alone, on a server that others use.
MODEL = f"model/{time.time_ns()}"


def specification(model):
    parallel = OffloadingParallelConfig(
        rank=0,
        world_size=1,
        tp_size=1,
        pp_size=1,
        pcp_size=1,
        dcp_size=1,
        data_parallel_index=0,
        data_parallel_size=1,
        data_parallel_rank_local=None,
        is_parallelism_agnostic=True,
    )
    config = OffloadingConfig(
        groups=(),
        worker_kv_bytes_per_block=SIZE,
        enable_kv_cache_events=False,
        extra_config={},
        engine_id="engine",
        model=OffloadingModelConfig(name=model, dtype="float16"),
        cache=OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1),
        parallel=parallel,
    )
    return SimpleNamespace(config=config, blocks_per_chunk=1)


def key(number):
    return make_offload_key(number.to_bytes(8, "big"), 0)


def job(number, keys, chunks, load=False):
    return TransferJob(number, [key(one) for one in keys], numpy.array(chunks), load, REQUEST)


def ended(tier):
    tier.drain_jobs()
    (result,) = tier.get_finished_jobs()
    assert list(tier.get_finished_jobs()) == []
    return result


def look(tier, keys):
    """Look up as vLLM's scheduler does, step by step."""
    deadline = time.monotonic() + 120
    while True:
        results = [tier.lookup(key(one), REQUEST) for one in keys]
        if LookupResult.RETRY not in results:
            tier.on_request_finished(REQUEST)
            return [result is LookupResult.HIT for result in results]
        assert time.monotonic() < deadline
        tier.on_schedule_end(ScheduleEndContext(new_req_ids=[], preempted_req_ids=()))
        time.sleep(0.01)


@pytest.fixture(params=["rdma", "tcp"] if REAL else ["embedded", "tcp"])
def url(request, name):
    if REAL:
        return REAL.replace("rdma", request.param, 1)
    return serve_embedded(name) if request.param == "tcp" else f"embedded://{name}"


@pytest.fixture
def array():
    return numpy.random.default_rng(1).integers(0, 255, (CHUNKS, SIZE), dtype=numpy.uint8)


@pytest.fixture
def tier(request, url, array):
    config = {"type": "LandingTierManager", "module_path": "valkey_rdma.vllm_landing", "url": url}
    model = f"{MODEL}/{request.node.name}"
    tier = SecondaryTierFactory.create_secondary_tier(config, memoryview(array), specification(model))
    yield tier
    tier.shutdown()


def test_chunks_go_and_come_back(tier, array):
    assert isinstance(tier, LandingTierManager)
    assert look(tier, range(4)) == [False] * 4
    tier.submit_store(job(1, range(4), range(4)))
    result = ended(tier)
    assert (result.job_id, result.success, result.transfer_bytes) == (1, True, 4 * SIZE)
    assert look(tier, [0, 1, 2, 3, 9]) == [True] * 4 + [False]
    expected = array[:4].copy()
    array[:4] = 0
    tier.submit_load(job(2, range(4), [7, 6, 5, 4], load=True))
    assert ended(tier).success
    assert (array[[7, 6, 5, 4]] == expected).all()
    if tier._pool.transport != "tcp":
        counts = tier._pool.counts
        assert sum(one.bytes_lent for one in counts) == 4 * SIZE, "nothing that is stored is copied"
        assert sum(one.bytes_landed for one in counts) >= 4 * (SIZE - (1 << 20) - (1 << 10))


def test_what_is_gone_is_told_and_missed(tier, url, array):
    tier.submit_store(job(1, [1, 2], [1, 2]))
    assert ended(tier).success
    for one in [1, 2, 3]:
        tier.lookup(key(one), REQUEST)
    with Client(url) as client:
        client.delete(tier.name(key(2)))
    tier.submit_load(job(2, [1, 2], [3, 4], load=True))
    result = ended(tier)
    assert (result.success, result.successful_keys) == (False, (key(1),))
    assert (array[3] == array[1]).all()
    assert look(tier, [1, 2, 3]) == [True, False, False]
    tier.submit_load(job(3, [9], [5], load=True))
    assert not ended(tier).success


def test_an_empty_job_ends(tier):
    tier.submit_store(job(1, [], []))
    assert ended(tier).success
