"""Several owners: the posterior of one, shares of the noise, and nothing else leaves a holder.

Trials with processes are in federation_runs.py, which runs once.
"""

import io
import math
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import cluster_runs
import federation_runs
import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from cluster_runs import SECURE, data, make
from pyro.infer.autoguide import AutoNormal
from scipy.stats import kstest
from test_cluster import require_equal
from trials import found_by

from pyro_dp import (
    DPSEP,
    DPSVI,
    ClusterError,
    ConfigurationError,
    Execution,
    FixedSizeSampling,
    ModelError,
    Noise,
    PrivacyAccountant,
)
from pyro_dp.federated import AtTrustedAggregator, Federation, ShamirSums, TrustedAggregator
from pyro_dp.mechanism.contributions import Block
from pyro_dp.mechanism.federation import Holders
from pyro_dp.mechanism.fixed_point import FixedPointSum
from pyro_dp.mechanism.messages import Ledger, Settings
from pyro_dp.mechanism.peers import Says, _digests, _LooksAnew
from pyro_dp.mechanism.system_random import SystemGenerator
from pyro_dp.mechanism.trusted_aggregator import Message
from pyro_dp.records.arguments import argument_names, find_shards

_UNITS = 2.0**30
UPLOAD = torch.zeros(1, dtype=torch.int64)


def results():
    trials = [each.__name__ for each in federation_runs.TRIALS]
    return found_by(federation_runs.__file__, *trials)


def noisy(size, sigma, shares, add, value=0.0):
    """A release of one owner, whose sum is the value in each coordinate."""
    clipped = FixedPointSum([Block(size, 1.0)])
    clipped.add_sums([torch.full((size,), int(value * _UNITS))])
    clipped.in_shares(shares, add)
    clipped.require_noise([sigma])
    return clipped._noisy([sigma], SystemGenerator())[0]


@pytest.mark.long
class TestHolders:
    @pytest.mark.slow
    def test_they_find_what_one_process_finds(self):
        """With equal noise: one share has it all. A holder may have no records."""
        require_equal(results()["equality"])

    def test_what_leaves_them_has_a_share_of_the_noise(self):
        """Every release, holder and number has a draw of its own: at least 5 x 3 x 2."""
        found = results()["uploads"]
        shares = []
        for release, uploads in enumerate(found["uploads"]):
            for index, upload in uploads.items():
                sent = np.frombuffer(bytes.fromhex(upload), "<i8")
                own = found["holders"][int(index)]
                shares += list((sent - own["exact"][release]) / _UNITS)
        assert len(shares) >= 30 and len(set(shares)) == len(shares)
        # Blocks differ in their part of the cost: at least a share of sigma, below four times it.
        assert 0.6 < np.std(shares) / own["sigma"] < 4.0

    def test_each_counts_for_itself(self):
        for own in results()["uploads"]["holders"]:
            assert own["counted"] == 5 and 0.99 < own["epsilon"] <= 1.0
            notes = " ".join(own["notes"])
            assert "3 holders" in notes and "trusted aggregator" in notes

    def test_how_long_they_compute_is_not_told(self):
        assert results()["uploads"]["told"] == [0]

    def test_one_that_drops_out(self):
        first, second, lost = results()["dropouts"]["one"]
        assert lost is None
        for each in (first, second):
            assert each["said"] is None and each["steps"] == 6
            assert "Only 2 of the 3 holders stayed" in each["told"][0]
            # The journal has each release before it is uploaded.
            assert each["calls"] == list(range(1, 8)) and each["counted"] == 7

    def test_more_than_may_drop_out(self):
        first, *lost = results()["dropouts"]["two"]
        assert lost == [None, None]
        assert "Only 1 holders are left" in first["said"]
        assert (first["steps"], first["counted"]) == (1, 3)

    def test_they_go_on_after_a_crash(self):
        """One journal counts one release beyond its state. All add noise for its budget."""
        before, after, _ = results()["resumed"]
        assert before[0] == before[1] == before[2]
        (found, _, sigma, _), *others = after
        assert all(each[0] == found and each[2] == sigma for each in others)
        assert sigma > before[0]
        assert [each[3] for each in after] == [5, 6, 5]
        assert all(each[1] <= 1.0 for each in after) and after[1][1] > 0.99

    def test_one_that_loads_a_state_of_a_smaller_ledger(self):
        (found, _, sigma), *others = results()["resumed"][2]
        assert all(each[0] == found and each[2] == sigma for each in others)

    @pytest.mark.parametrize("trial", [1, 2], ids=["in new processes", "in the same"])
    def test_looks_go_on_after_a_crash(self, trial):
        """One owner has spent a look more: all have its share of the budget left."""
        found, epsilons = zip(
            *(each[:2] for each in results()["looks_resumed"][trial]), strict=True
        )
        assert found[0] == found[1] == found[2]
        assert all(each <= 1.0 for each in epsilons) and epsilons[1] > 0.99

    def test_a_budget_of_ones_own(self):
        """Nobody pays for a release that one of them refuses."""
        first, second = results()["refusals"]["budget"]
        assert first[0].startswith("ClusterError: Holder 1 failed")
        assert second[0].startswith("PrivacyBudgetExceeded: ")
        assert first[1:] == second[1:] and first[1] > 2

    def test_noise_is_that_of_the_smallest_budget(self):
        first, second = results()["refusals"]["calibrated"]
        assert first == second and first[:3] == [None, 5, 4]
        assert first[3] > 5.0  # a budget of 3 would make it 3.9

    def test_others_do_not_learn_what_an_error_says(self):
        first, second = results()["refusals"]["broken"]
        assert first[0].startswith("ClusterError: Holder 1 failed")
        assert "NaN" not in first[0] and "NaN" in second[0]
        assert first[1] == second[1] == 0

    def test_settings_that_differ(self):
        for kind, text in (("other_numbers", "colluders differ"), ("other_settings", "num_steps")):
            for said in results()["refusals"][kind]:
                assert text in str(said)


@pytest.mark.long
class TestRunsOfShamirSums:
    def test_the_posterior_is_that_of_one_process(self):
        found = results()["shamir"]
        for own, notes in found["fit"]:
            assert own == pytest.approx(found["alone"], rel=0, abs=1e-9)
            assert any("secret sharing" in each and "2 colluding" in each for each in notes)

    def test_totals_are_exact(self):
        for each in results()["shamir"]["sends"]:
            assert each["total"] == [2**62 + 7 - 2**63] * 400
            assert each["present"] == [0, 1, 2]

    def test_all_others_together_see_uniform_numbers(self):
        """Each share, and what a line through two of the three says of the upload."""
        for index, each in enumerate(results()["shamir"]["sends"]):
            shares = {int(other) + 1: np.array(own) for other, own in each["shares"].items()}
            assert len(shares) == 2 and (index + 1) not in shares
            (one, first), (two, second) = shares.items()
            # The line at zero, times two - one, which is 1 or 2.
            guessed = (two * first - one * second) % 1.0
            for numbers in (first, second, (first + second) % 1.0, guessed):
                assert len(numbers) == 400 and kstest(numbers, "uniform").pvalue > 1e-8

    def test_nobody_changes_what_two_others_tell_each_other(self):
        """Two holders that hear of different noise would add too little together."""
        heard = [each["heard"] for each in results()["shamir"]["sends"]]
        assert heard == [["of 0", "of 1", "of 2"], ["of 0", "of 1", "of ?"], heard[0]]

    def test_sizes_that_differ_open_nothing(self):
        for each in results()["shamir"]["sends"]:
            first, second = each["refused"]
            assert "nothing was opened" in first and "not at the same point" in second

    def test_one_that_dies(self):
        *others, dead = results()["shamir"]["dies"]
        assert dead is None
        for said in others:
            assert len(said) == 2 and all("lost the others" in each for each in said)


def test_nobody_finds_noise_of_equal_digests():
    """These numbers have the same CRC-32: a holder could tell two others different ones."""
    texts = [repr(each).encode() for each in (10.63023464025943, 5.289628790395021)]
    one, other = (_digests([text], [b"0.1"], [b"1"]) for text in texts)
    assert len({*one, *other}) == 6
    assert _digests([texts[0]], [b"0.1"], [])[:2] == one[:2]
    assert _digests([b"1", b"2"]) != _digests([b"12"])


class TestShamirSums:
    @pytest.mark.parametrize(
        ("given", "text"),
        [
            ((["a:1", "b:2"], 2), "index"),
            ((["a:1", "b:2"], -1), "index"),
            ((["a:1"], 0), "addresses"),
        ],
    )
    def test_arguments_that_make_no_sense(self, given, text):
        with pytest.raises(ConfigurationError, match=text):
            ShamirSums(*given)

    def test_what_it_does_not_carry(self):
        channel = ShamirSums.__new__(ShamirSums)
        channel._addresses = ["a:1", "b:2"]
        channel.begin(2, 0)
        with pytest.raises(ConfigurationError, match="holders"):
            channel.begin(3, 0)
        with pytest.raises(ConfigurationError, match="dropouts must be 0"):
            channel.begin(2, 1)

    @pytest.mark.slow
    @pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes certificates")
    def test_a_certificate_is_that_of_one_holder(self):
        """With two parts a holder would see the last one's upload."""
        found = found_by(federation_runs.__file__, "certificates")["certificates"]
        assert found["sums"] == [[7]] * 3
        assert found["sent"][:2] == [0, 0]

    def test_without_mpyc(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "mpyc.runtime", None)
        with pytest.raises(ConfigurationError, match="pip install"):
            ShamirSums(["a:1", "b:2"], 0)


@pytest.mark.slow
def test_the_example(tmp_path):
    example = Path(federation_runs.__file__).parents[1] / "examples" / "federated_logistic.py"
    addresses = federation_runs._addresses(2)
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(example.parents[1]), os.environ.get("PYTHONPATH", "")]),
    }
    started = [
        subprocess.Popen(
            [sys.executable, str(example), str(index), "--plain", *addresses],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            env=environment,
        )
        for index in range(2)
    ]
    said = [each.communicate(timeout=300) for each in started]
    for out, errors in said:
        assert "epsilon = 1.000 of 1, by 2 holders" in out, errors
    assert said[0][0] == said[1][0]


class TestShares:
    @pytest.mark.parametrize(
        ("holders", "dropouts", "colluders"), [(4, 1, 1), (5, 2, 1), (4, 0, 2)]
    )
    def test_what_is_left_hides_a_record(self, holders, dropouts, colluders):
        """With the drop-outs' shares missing, and the colluders' subtracted."""
        honest = holders - dropouts - colluders
        left = []
        for _ in range(holders - dropouts):
            noisy(40_000, 2.0, honest, lambda units: left.append(units) or units)
        known = sum(left[honest:], torch.zeros_like(left[0]))
        hidden = (sum(left) - known).double() / _UNITS
        assert hidden.std().item() == pytest.approx(2.0, rel=0.021)

    def test_too_little_noise_for_a_share(self):
        with pytest.raises(ConfigurationError, match="multiplier"):
            noisy(1, 2.0**-16, 4, lambda units: units)


class TestAggregator:
    ADD = {"holders": 3, "dropouts": 1}

    @staticmethod
    def numbers(*values):
        return np.array(values, "<i8").tobytes()

    def added(self, aggregator, **given):
        messages = {
            int(name[1:]): Message("add", self.ADD, self.numbers(*values)).packed()
            for name, values in given.items()
        }
        return {index: Message.read(each) for index, each in aggregator.answer(messages).items()}

    def test_totals_are_those_of_all(self):
        said = self.added(TrustedAggregator(3, 1), h0=[1, 2], h1=[3, 4], h2=[5, -6])
        assert said.keys() == {0, 1, 2}
        for each in said.values():
            assert each.kind == "add" and each.facts["present"] == [0, 1, 2]
            assert each.numbers().tolist() == [9, 0]

    def test_they_are_modulo_2_to_the_64(self):
        said = self.added(TrustedAggregator(3, 1), h0=[2**63 - 1], h1=[1], h2=[0])
        assert said[0].numbers().tolist() == [-(2**63)]

    def test_who_stayed_away_is_left_out_for_good(self):
        aggregator = TrustedAggregator(3, 1)
        assert self.added(aggregator, h0=[1], h2=[5])[0].numbers().tolist() == [6]
        said = self.added(aggregator, h0=[1], h1=[3], h2=[5])
        assert said[0].facts["present"] == [0, 2] and said[0].numbers().tolist() == [6]
        assert (said[1].kind, said[1].facts["reason"]) == ("failed", "left out")

    def test_too_few_open_nothing(self):
        aggregator = TrustedAggregator(3, 1)
        said = self.added(aggregator, h1=[1])
        assert said[1].facts == {"reason": "too few", "left": 1} and aggregator.done
        said = self.added(aggregator, h0=[1], h1=[1], h2=[1])
        assert all(each.kind == "failed" and not each.content for each in said.values())

    def test_what_does_not_belong_together_is_not_opened(self):
        good = Message("add", self.ADD, self.numbers(1)).packed()
        for other in (
            Message("talk", {}, b"x"),
            Message("add", self.ADD, self.numbers(1, 2)),
            Message("add", {"holders": 3, "dropouts": 2}, self.numbers(1)),
            Message("add", self.ADD, b"123"),
            Message("open", {}),
        ):
            answers = TrustedAggregator(3, 1).answer({0: good, 1: good, 2: other.packed()})
            said = [Message.read(each) for each in answers.values()]
            assert all(each.kind == "failed" and not each.content for each in said), other
        for other in (b"[]", b"[" * 200_000 + b"\n"):
            assert b"failed" in TrustedAggregator(3, 1).answer({0: good, 1: good, 2: other})[0]

    def test_it_is_done_when_all_have_left(self):
        aggregator, bye = TrustedAggregator(2), Message("leave", {}).packed()
        assert not aggregator.done
        assert Message.read(aggregator.answer({0: bye, 1: bye})[1]).kind == "leave"
        assert aggregator.done

    @pytest.mark.parametrize("given", [(1,), (2, 1), (3, -1), (3, 0, 0.0), (3, 0, math.nan)])
    def test_numbers_that_make_no_sense(self, given):
        with pytest.raises(ConfigurationError):
            TrustedAggregator(*given)


class Alone:
    """A line on which the other of two holders says the same, or whatever a test wants."""

    index = 0

    def __init__(self):
        self.aggregator, self.other = TrustedAggregator(2), None

    def ask(self, message):
        other = self.other or message
        return self.aggregator.answer({0: message, 1: other})[0]


@pytest.fixture
def line():
    return Alone()


@pytest.fixture
def federation(line):
    return Federation(AtTrustedAggregator(line), holders=2)


def said_by_other(content):
    own = io.BytesIO()
    torch.save(content, own)
    return Message("talk", {}, own.getvalue()).packed()


class TestFederation:
    @pytest.mark.parametrize(
        ("given", "text"),
        [
            ({"holders": 1}, "holders"),
            ({"holders": 3, "dropouts": 2, "colluders": 1}, "dropouts \\+ colluders"),
            ({"holders": 2, "colluders": -1}, "colluders"),
            ({"holders": 2, "colluders": 0}, "colluders"),
        ],
    )
    def test_numbers_that_make_no_sense(self, line, given, text):
        with pytest.raises(ConfigurationError, match=text):
            Federation(AtTrustedAggregator(line), **given)

    @pytest.mark.parametrize(
        ("given", "text"),
        [({"noise": None}, "system"), ({"sampling": FixedSizeSampling()}, "FixedSizeSampling")],
    )
    def test_settings_that_do_not_go_with_it(self, federation, given, text):
        accountant = PrivacyAccountant(1.0, neighboring="replace_one")
        with pytest.raises(ConfigurationError, match=text):
            make("svi", accountant, federation, **{"noise": SECURE} | given)

    def test_what_others_send_is_no_code(self, line, federation, tmp_path):
        line.other = Message("talk", {}, pickle.dumps(_Writes(tmp_path / "written"))).packed()
        with pytest.raises(ClusterError, match="cannot be read"):
            federation.exchange(1)
        assert not (tmp_path / "written").exists()

    @pytest.mark.parametrize("method", ["svi", "sep", "vips"])
    @pytest.mark.parametrize(
        "said", ["5", None, 10**400, float("nan"), [], {}, (), ("5",), (None,)]
    )
    def test_a_message_of_another_kind_spends_nothing(self, method, said):
        """Each of the first six things that another owner says."""
        for turn in range(6):
            cluster_runs.fresh()
            line = Alone()
            federation = Federation(AtTrustedAggregator(line), holders=2)
            accountant = PrivacyAccountant(3.0)
            inference = make(method, accountant, federation, noise=SECURE)
            asked, ask = [], line.ask

            def answered(message, turn=turn, asked=asked, ask=ask, line=line):
                asked.append(message)
                line.other = said_by_other(said) if len(asked) > turn else None
                return ask(message)

            line.ask = answered
            with pytest.raises(ClusterError, match="message of holder 1 cannot be read"):
                inference.run(*data(), progress=False)
            assert accountant.num_releases == 0 and len(asked) > turn

    @pytest.mark.parametrize(
        ("method", "noise", "steps"),
        [("svi with an optim", SECURE, 1), ("vips", Noise(20.0, source="system"), 0)],
        ids=["after a release on a sample", "instead of one's own"],
    )
    def test_noise_is_not_chosen_by_another(self, method, noise, steps):
        """Otherwise another holder could choose noise after a release, or less than is set here."""
        line = Alone()
        federation = Federation(AtTrustedAggregator(line), holders=2)
        accountant = PrivacyAccountant(3.0)
        inference = make(method, accountant, federation, noise=noise, sampling=0.5)
        for _ in range(steps):
            inference.step(*data())
        ask, ready = line.ask, [[Says.READY]] * steps

        def answered(message):
            own = torch.load(io.BytesIO(Message.read(message).content), weights_only=True)
            line.other = None
            if isinstance(own, list) and own[:1] in ready:
                line.other = said_by_other([int(Says.LOOKS_ANEW), 0, 0, 0, 0])
            elif own == (inference._reservation.noise_multiplier,):
                line.other = said_by_other((None,))
            return ask(message)

        line.ask = answered
        with pytest.raises(ClusterError, match="noise differs between holders"):
            inference.step(*data())
        assert accountant.num_releases == steps

    @pytest.mark.parametrize("said", [["1"], [1, 2], 1, None, [-1], [10**400], [True]])
    def test_numbers_that_are_none(self, line, federation, said):
        line.other = said_by_other(said)
        with pytest.raises(ClusterError, match="message of holder 1 cannot be read"):
            federation.tell_all([1])

    @pytest.mark.parametrize("total", [None, 5, [5], np.ones(1), np.ones(2, int), torch.ones(1)])
    def test_totals_that_are_none(self, federation, total):
        federation._channel.add = lambda upload: (total, [0, 1])
        with pytest.raises(ClusterError, match="is not the sum"):
            federation.add(UPLOAD)

    def test_one_holder_counts_once(self, federation):
        federation._channel.add = lambda upload: (upload, [0, 0])
        with pytest.raises(ClusterError, match="Only 1"):
            federation.add(UPLOAD)

    @pytest.mark.parametrize(
        ("answer", "text"),
        [
            (b"", "cannot be read"),
            (b"5\n", "cannot be read"),
            (b'{"kind": "add", "present": [0, 1, 2]}\n', "cannot be read"),
            (b'{"kind": "add", "present": [0]}\n' + b"\0" * 8, "Only 1"),
            *(
                (Message("failed", {"reason": reason, "left": None}).packed(), "cannot be read")
                for reason in ([], {}, None, 10**400)
            ),
        ],
    )
    def test_answers_of_an_aggregator_that_are_damaged(self, line, federation, answer, text):
        """These include totals of too few holders, and unknown reasons."""
        line.ask = lambda message: answer
        with pytest.raises(ClusterError, match=text):
            federation.add(UPLOAD)

    def test_one_that_was_interrupted_is_out_of_step(self, line, federation):
        def interrupted(message):
            raise SystemExit  # unlike Ctrl-C, it fails the test if it comes twice

        line.ask = interrupted
        with pytest.raises(SystemExit):
            federation.tell_all([1])
        with pytest.raises(ClusterError, match="was interrupted"):
            federation.add(UPLOAD)

    def test_its_own_generator_is_not_told(self, line):
        """Splits and dithering of the past can be computed from a generator's state."""
        torch.manual_seed(1)
        own, said, ask = torch.get_rng_state(), [], line.ask
        line.ask = lambda message: said.append(message) or ask(message)
        federation = Federation(AtTrustedAggregator(line), holders=2)
        Holders(federation, PrivacyAccountant(1.0)).common(Settings({}), Ledger({}, None, 0, "run"))
        # Any 64 bytes of it would do: a state is 5,056 bytes, most of them random.
        state = own.numpy().tobytes()
        parts = {state[i : i + 64] for i in range(64, 2048, 64)}
        assert len(said) > 4 and not any(part in each for part in parts for each in said)

    def test_public_draws_are_chosen_by_nobody(self, line, federation):
        """A draw depends on both holders' numbers, so neither can choose it."""
        line.other = said_by_other((5,))
        found = [federation.agreed_states()[0] for _ in range(3)]
        assert not any(torch.equal(found[i], found[i - 1]) for i in range(3))

    def test_a_selection_that_hides_its_trials(self, federation):
        accountant = PrivacyAccountant(1.0)
        accountant.silent = True
        with pytest.raises(ConfigurationError, match="private selection"):
            make("svi", accountant, federation, noise=SECURE)

    @pytest.mark.parametrize("method", ["svi", "sep"])
    def test_own_rows_that_a_model_holds(self, federation, method):
        """As many as here, and half of all."""
        x, y = data()
        kept = (x - 1.3) * 0.77

        def holding(x, y):
            w = pyro.sample("w", dist.Normal(torch.zeros(2), 2.0).to_event(1))
            with pyro.plate("people", len(x)):
                pyro.sample("y", dist.Bernoulli(logits=x @ w + kept.mean()), obs=y)

        own = {"accountant": PrivacyAccountant(1.0), "execution": Execution(peers=federation)}
        kind = {"svi": DPSVI, "sep": DPSEP}[method]
        inference = kind(holding, AutoNormal(holding), noise=SECURE, **own)
        with pytest.raises(ModelError, match="kept"):
            inference.run(x, y, progress=False)

    @pytest.mark.parametrize("rows", [{"x": 0, "y": 60}, {"x": 60, "y": 0}])
    def test_another_cannot_make_a_constant_of_rows(self, line, federation, rows):
        """Others get its digest, which one record changes. Nothing else refuses these y."""

        def by_index(x, y):
            w = pyro.sample("w", dist.Normal(torch.zeros(2), 2.0).to_event(1))
            with pyro.plate("people", len(x)) as index:
                pyro.sample("y", dist.Bernoulli(logits=x[index] @ w), obs=y[index])

        ask, told = line.ask, []

        def answered(message):
            own = torch.load(io.BytesIO(Message.read(message).content), weights_only=True)
            line.other = None
            told.append(own[:1] if isinstance(own, list) else own)
            if isinstance(own, tuple) and own[0] == ["x", "y"]:
                shapes = [(rows[name], *each[1:]) for name, each in zip(*own, strict=True)]
                line.other = said_by_other((own[0], shapes))
            return ask(message)

        line.ask = answered
        own = {"accountant": PrivacyAccountant(1.0), "execution": Execution(peers=federation)}
        x, y = data()[0].numpy(), np.zeros(60)
        with pytest.raises(ModelError, match="'[xy]' for a public constant"):
            DPSEP(by_index, AutoNormal(by_index), noise=SECURE, **own).step(x, y)
        assert (["x", "y"] in [each[0] for each in told if each]) and [Says.READY] not in told

    @pytest.mark.parametrize(
        "given",
        [
            ([[63.725, 181.44]], [1.0]),
            (torch.ones(1, 2), [1.0]),
            ([{"age": 63.725}],),
            ({"ann": {"age": 63.725}},),
            (torch.ones(1, 2), ("Ann",)),
        ],
    )
    def test_a_record_that_is_no_tensor_is_not_told(self, given):
        said = []
        names = argument_names(lambda x, y: None, given, {})
        with pytest.raises(ModelError, match="must pass its records as tensors"):
            find_shards(names, (given, {}), lambda public: said.append(public) or [public] * 2)
        assert not said

    def test_numbers_are_not_told(self):
        said = []
        given = (torch.ones(3, 2), 63.725)
        names = argument_names(lambda x, y: None, given, {})
        find_shards(names, (given, {}), lambda public: said.append(public) or [public] * 2)
        assert said and "63" not in repr(said)

    def test_settings_of_numpy(self, federation):
        noise, rate = Noise(np.float64(5.0), source="system"), np.float64(0.5)
        vips = make("vips", PrivacyAccountant(1.0), federation, noise=noise, sampling=rate)
        assert type(vips.sampling.rate) is type(vips.noise_multiplier) is float

    def test_one_that_always_looks_anew(self, federation):
        holders = Holders(federation, PrivacyAccountant(1))
        looks = []

        def step():
            looks.append(holders.look_anew(True))
            raise _LooksAnew

        with pytest.raises(ClusterError, match="again and again"):
            holders.step(step)
        assert len(looks) == 10

    def test_it_ends(self, line, federation):
        federation.leave()
        federation.leave()
        assert line.aggregator.done
        with pytest.raises(ClusterError, match="left the federation"):
            federation.tell_all([1])
        with pytest.raises(ConfigurationError, match="process"):
            pickle.dumps(federation)
        assert repr(federation) == "Federation(index=0, holders=2, dropouts=0, colluders=1)"


class _Writes:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))
