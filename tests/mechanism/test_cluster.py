"""Several processes: the numbers of one, one noise and one ledger, and no wait without an end.

Trials with processes are in cluster_runs.py, which runs once, and once more for slow ones.
"""

import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import cluster_runs
import pyro
import pyro.distributions as dist
import pytest
import torch
import torch.distributed
from cluster_runs import make
from pyro.infer.autoguide import AutoNormal
from trials import found_by

from pyro_dp import (
    DPSVI,
    Cluster,
    ClusterError,
    ClusterWarning,
    ConfigurationError,
    Execution,
    FixedSizeSampling,
    ModelError,
    PrivacyAccountant,
    PrivacyError,
    SubsampledGaussian,
    nonprivate,
)
from pyro_dp.accounting.origins import Origin
from pyro_dp.mechanism.clipping import ClippedSum
from pyro_dp.mechanism.cluster import Ranks
from pyro_dp.mechanism.contributions import Block
from pyro_dp.mechanism.fixed_point import FixedPointSum
from pyro_dp.mechanism.messages import Shapes
from pyro_dp.mechanism.sampling import AllRecords, RecordSampler
from pyro_dp.mechanism.streams import Randomness
from pyro_dp.records.arguments import as_of_all, find_shards
from pyro_dp.records.first_look import _find_plate

EVENT = SubsampledGaussian(1.0)
# The errors of both ranks, if the second one differs.
DIFFERENCES = {
    "other_settings": ("ClusterError: noise_multiplier differs", "ClusterError: noise_mult"),
    "other_parameters": ["ClusterError: The parameters"] * 2,
    "other_constants": ["ClusterError: The parameters"] * 2,
    "other_rows": ["ModelError: The rows of 'x'"] * 2,
    "other_calls": ["ClusterError: The ranks are not"] * 2,
    "earlier_releases": ("ClusterError: Rank 1 failed", "PrivacyError: This process counts 1"),
}

ALWAYS = [each.__name__ for each in cluster_runs.ALWAYS]
SLOW = [each.__name__ for each in cluster_runs.SLOW]


def results(trial):
    """Run all usual trials in one process, or all slow ones: a process starts in seconds."""
    return found_by(cluster_runs.__file__, *(ALWAYS if trial in ALWAYS else SLOW))[trial]


def require_equal(found):
    one = found["one process"]
    assert len(found["ranks"]) == 3
    for own in found["ranks"]:
        assert own.keys() == one.keys()
        for method, values in one.items():
            assert own[method] == pytest.approx(values, rel=0, abs=1e-9), method


@pytest.mark.long
class TestRuns:
    @pytest.mark.slow
    def test_ranks_find_what_one_process_finds(self):
        require_equal(results("equality"))

    def test_dpsvi_has_the_same_method_on_all_ranks(self):
        """This holds in a loop that is longer than the looks, and after a failed attempt."""
        first, second = results("methods").values()
        assert first == second
        (looks, *counts, _), (gradients, *others, _) = first
        assert (looks, gradients) == ("Looks", "StochasticGradientVI")
        assert counts[0] == counts[1] < 16 and others == [5, 5]

    @pytest.mark.slow
    def test_all_methods_find_what_one_process_finds(self):
        require_equal(results("equality_of_all"))

    def test_integers_are_equal_bit_for_bit(self):
        found = results("secure")
        one = found["one process"]
        assert len(one) == 3 and all(sums and any(sums[0][0]) for sums in one.values())
        assert found["ranks"] == one

    def test_ranks_with_one_seed_draw_records_of_their_own(self):
        first, second = (each["drawn"] for each in results("samples"))
        assert len(first) == len(second) == 21
        both = sum(len(set(a) & set(b)) for a, b in zip(first, second, strict=True))
        # Independent at rate 1/2: a quarter of 21 x 30 pairs; with one stream, a half.
        assert abs(both / 630 - 0.25) < 0.09
        assert not any(a == b for a, b in zip(first, second, strict=True))

    def test_noise_is_drawn_once_and_sums_stay_with_rank_0(self):
        first, second = results("samples")
        assert (first["noises"], second["noises"]) == (21, 0)
        assert (first["releases"], second["releases"]) == (21, 21)
        assert all(first["left"]) and not any(second["left"])
        assert first["global draws"] and second["global draws"]

    def test_mirrors_refuse_what_only_the_ledger_can_tell(self):
        first, second = (each["refused"] for each in results("samples"))
        assert first[0] is first[2] is first[3] is None
        for said, name in zip(
            second, ("save()", "journal()", "report()", "state_dict"), strict=True
        ):
            assert said.startswith(f"PrivacyError: {name}: ") and "rank 0" in said.lower()

    def test_ranks_that_differ_are_told(self):
        for case, expected in DIFFERENCES.items():
            for said, start in zip(results("differences"), expected, strict=True):
                assert said[case].startswith(start), case

    def test_what_users_draw_and_pass_between_steps_changes_nothing(self):
        for found in results("differences"):
            for case in ("draws_between_steps", "new_arguments"):
                assert found[case] == found["no_draws_between_steps"]

    @pytest.mark.slow
    def test_ranks_use_graphs_together_or_not_at_all(self):
        assert [each["graphs_on_one"] for each in results("differences")] == ["EagerStep"] * 2

    def test_what_rank_0_refuses_is_no_release(self):
        first, second = (each["refused_by_first"] for each in results("differences"))
        assert first == ["PrivacyError", 0, 0, 1, 1]  # and it is not the end of the cluster
        assert second == ["ClusterError", 0, 0, 1, 1]

    def test_a_callback_of_one_rank_stops_all(self):
        first, second = (each["stopped_by_one"] for each in results("differences"))
        assert first == second
        assert first[-3:-1] == [2, "a callback stopped it"]

    def test_failures(self):
        """Typed errors in time, nothing before the ledger, and another number of ranks goes on."""
        assert results("failures") == {case: [] for case in cluster_runs.SOME}

    @pytest.mark.slow
    def test_more_failures(self):
        assert results("more_failures") == {case: [] for case in cluster_runs.MORE}


@pytest.fixture
def cluster():
    """A cluster of this process alone."""
    with tempfile.TemporaryDirectory() as folder:
        meeting = f"file://{folder}/meeting"
        torch.distributed.init_process_group("gloo", meeting, rank=0, world_size=1)
        try:
            yield Cluster(timeout=20)
        finally:
            torch.distributed.destroy_process_group()


def test_it_needs_a_process_group(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ConfigurationError, match="torchrun"):
        Cluster()


@pytest.mark.parametrize("timeout", [0.0, -1.0, float("inf"), float("nan"), "60", None])
def test_a_timeout_is_a_number_of_seconds(timeout):
    with pytest.raises(ConfigurationError, match="timeout"):
        Cluster(timeout)


def test_settings_that_do_not_go_with_a_cluster(cluster):
    with pytest.raises(ConfigurationError, match="FixedSizeSampling"):
        accountant = PrivacyAccountant(neighboring="replace_one")
        make("vips", accountant, cluster, noise=1.0, sampling=FixedSizeSampling(0.5))
    with pytest.raises(ConfigurationError, match="peers must be"):
        make("vips", PrivacyAccountant(), "loopback", noise=1.0)


def test_no_look_without_noise(cluster):
    with pytest.raises(ConfigurationError, match="nonprivate"):
        nonprivate(make("vips", PrivacyAccountant(), cluster, noise=1.0))


@pytest.mark.parametrize("amortised", [False, True])
def test_latents_of_a_record_are_refused(cluster, amortised):
    def hierarchy(x):
        mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
        with pyro.plate("people", len(x)):
            own = pyro.sample("own", dist.Normal(mean, 1.0))
            pyro.sample("x", dist.Normal(own, 1.0), obs=x)

    def guide(x):
        weight = pyro.param("weight", torch.tensor(0.5))
        pyro.sample("mean", dist.Normal(weight, 1.0))
        with pyro.plate("people", len(x)):
            pyro.sample("own", dist.Normal(weight * x, 1.0))

    accountant = PrivacyAccountant()
    own = dict(accountant=accountant, noise=1.0, num_steps=2, execution=Execution(peers=cluster))
    svi = DPSVI(hierarchy, guide if amortised else AutoNormal(hierarchy), **own)
    with pytest.raises(ConfigurationError, match="of each record"):
        svi.step(torch.linspace(0.0, 1.0, 7))
    assert not accountant.num_releases


def test_a_cluster_that_failed_is_of_no_more_use(cluster):
    def lost():
        raise RuntimeError("Connection closed by peer")

    with pytest.raises(ClusterError, match="Rank 0 lost the others while adding up"):
        cluster._heard("adding up", lost)
    with pytest.raises(ClusterError, match="cannot go on"):
        cluster.tell_all([1])


def test_a_step_that_is_mostly_talk_is_told(cluster, monkeypatch):
    ranks = Ranks(cluster, PrivacyAccountant(epsilon=1.0))
    cluster.size = 2
    assert ranks.warnings() == []
    monkeypatch.setattr(ranks, "_times", [(0.010, 0.007)] * 20)
    assert ranks.warnings() == []
    monkeypatch.setattr(ranks, "_times", [(0.010, 0.002)] * 20)
    (warning,) = ranks.warnings()
    assert isinstance(warning, ClusterWarning) and "10 ms" in str(warning)


def test_a_rank_has_streams_of_its_own():
    for purpose in ("sampling", "local", "noise"):
        draws = [
            Randomness(3, rank=rank).stream(purpose, position).random()
            for rank in range(3)
            for position in range(3)
        ]
        assert len(set(draws)) == 9
        assert Randomness(3).stream(purpose, 1).random() == draws[1]


def test_a_sampler_draws_from_the_records_that_are_here():
    stream = Randomness(0).stream("sampling", 0)
    drawn = torch.cat([RecordSampler("poisson", 1000, 0.5, 40).draw(stream) for _ in range(200)])
    assert drawn.max() == 39 and abs(len(drawn) / 8000 - 0.5) < 0.03
    assert len(RecordSampler("poisson", 1000, 0.5, 0).draw(stream)) == 0
    assert RecordSampler("full", 1000, 1.0, 40).draw(stream) == AllRecords(40)
    assert RecordSampler("poisson", 1000, 0.5, 0).usual_size == 1


@pytest.mark.parametrize("sum_type", [ClippedSum, FixedPointSum])
def test_a_sum_over_ranks_is_total_or_empty(sum_type):
    blocks = [Block(2, 1.0, 0.5), Block(1, 1.0, 0.5)]
    seen = []

    def doubled(part):
        seen.append(part)
        return 2 * part

    total, left = sum_type(blocks), sum_type(blocks)
    for each in (total, left):
        each.add(torch.tensor([[0.25, 0.5]]), torch.tensor([[0.5]]))
    total.over_ranks(doubled)
    left.over_ranks(lambda part: None)
    assert seen[0].dtype == sum_type.dtype and seen[0].shape == (3,)
    assert torch.allclose(torch.cat(total._exact_sums), torch.tensor([0.5, 1.0, 1.0]), atol=1e-8)
    assert not torch.cat(left._exact_sums).any()
    empty = sum_type(blocks)
    empty.over_ranks(doubled)
    assert not torch.cat(empty._exact_sums).any()


def test_a_mirror_shows_another_ledger():
    leader, mirror = PrivacyAccountant(9.0), PrivacyAccountant(9.0)
    leader.record(EVENT)
    mirror.follow()
    mirror.follow(leader.state_dict())
    assert mirror.num_releases == 1 and mirror.get_epsilon() == leader.get_epsilon()
    mirror.mirror(EVENT)
    assert mirror.num_releases == 2
    with pytest.raises(PrivacyError, match=r"record\(\)"):
        mirror.record(EVENT)
    with pytest.raises(PrivacyError, match="counts 2"):
        mirror.follow(leader.state_dict())
    with pytest.raises(PrivacyError, match="follows none"):
        leader.mirror(EVENT)


def test_a_mirror_tells_a_planned_release_from_one_that_was_made():
    leader, mirror = PrivacyAccountant(9.0), PrivacyAccountant(9.0)
    run = Origin.now("DPSEP", seeded=False, secure=False, reservation="one")
    with leader.next_position(run, 1.0, Counter({EVENT: 3})):
        leader.record(EVENT)
    mirror.follow(leader.state_dict())
    with leader.next_position(run, 1.0, Counter({EVENT: 2})):
        leader.record(EVENT)
    mirror.follow(leader.state_dict())
    assert mirror.num_releases == 2
    assert [left for _, left in mirror.reserved] == [{EVENT: 1}]


def test_a_mirror_has_no_journal(tmp_path):
    accountant = PrivacyAccountant()
    with accountant.journal(tmp_path / "journal"), pytest.raises(PrivacyError, match="rank 0"):
        accountant.follow()


def test_a_model_sees_as_many_rows_as_all_have():
    x, z = torch.ones(3, 2), torch.zeros(5)
    own = ((x, torch.ones(3), z, 2), {})
    names = ["x", "y", "z", "k"]

    def of_all(counts, *, names=names, kind="torch.float64"):
        def exchange(given):
            rows = [[(n, (2,), kind), (n, (), kind), (5, (), kind), (0, (), "int")] for n in counts]
            return [given, *(Shapes(names, each[: len(names)]) for each in rows)]

        return exchange

    constants, shard = find_shards(names, own, of_all([0, 7]))
    assert (constants.size, constants.places) == (15, {2})  # only the model knows which is which
    assert (shard.count, shard.size, shard.places) == (3, 10, {0, 1})
    (shown, also, constant, k), _ = as_of_all(own, shard)
    assert shown.shape == (10, 2) and also.shape == (10,) and constant is z and k == 2

    def model(x, y, z, k):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(w + x.sum(-1), z.exp().mean()), obs=y)

    plate, _, chosen = _find_plate(model, own, (constants, shard), None)
    assert plate.size == 10 and chosen is shard
    with pytest.raises(ModelError, match="number or kind"):
        find_shards(names, own, of_all([7], names=["x", "y"]))
    with pytest.raises(ModelError, match="dtype"):
        find_shards(names, own, of_all([7], kind="torch.float32"))
    with pytest.raises(ModelError, match="No process"):
        find_shards(["x"], ((x[:0],), {}), lambda given: [given])


EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "ray", "pyspark"])
def test_examples(launcher, tmp_path):
    """Under torchrun, and under Ray and Spark where they are installed."""
    launch = {
        "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
        "ray": [],
        "pyspark": [],
    }[launcher]
    if launcher != "torchrun":
        pytest.importorskip(launcher)
    name = {"torchrun": "logistic", "ray": "ray", "pyspark": "spark"}[launcher]
    folders = [str(EXAMPLES), str(EXAMPLES.parent), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, *launch, str(EXAMPLES / f"cluster_{name}.py")],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(folders)},
    )
    assert done.returncode == 0, done.stderr
    assert "epsilon = 1.000 of 1, by 2 processes" in done.stdout + done.stderr
