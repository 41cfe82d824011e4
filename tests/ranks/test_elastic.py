"""Elastic ranks: state and samplers in one process, and jobs under the real launcher whose ranks die, hang and come."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardwright as sw
from shardwright import ranks
from shardwright.object_codec import dumps, loads
from shardwright.ranks import host_copies
from shardwright.ranks.elastic import ElasticSampler, State
from tests.ranks.elastic_jobs import ElasticJob, hosts_file
from tests.ranks.elastic_training import curve
from tests.ranks.processes import run_ranks

# ---- state -----------------------------------------------------------------------


def test_a_state_goes_back_to_its_last_commit() -> None:
    state = State(params={"w": jnp.ones(3)}, table=np.zeros(2), epoch=0, seen=[1])
    state.params, state.epoch = {"w": jnp.full(3, 2.0)}, 1
    state.table[0] = 7
    state.commit()
    state.params, state.epoch = {"w": jnp.zeros(3)}, 5
    state.seen.append(2)
    state.table[0] = 9
    state.restore()
    assert isinstance(state.params["w"], jax.Array)
    assert state.params["w"].tolist() == [2.0, 2.0, 2.0]
    assert (state.epoch, state.seen, state.table.tolist()) == (1, [1], [7, 0])
    state.seen.append(3)  # what is restored shares nothing with what was saved
    state.restore()
    assert state.seen == [1]


def test_a_state_that_was_never_committed_goes_back_to_its_first_values() -> None:
    state = State(epoch=3)
    state.epoch = 4
    state.restore()
    assert state.epoch == 3


class Model:
    """Has a state_dict, as modules and optimizers of PyTorch do."""

    def __init__(self) -> None:
        self.weights = np.zeros(2)

    def state_dict(self):
        return {"weights": self.weights}

    def load_state_dict(self, state) -> None:
        self.weights = state["weights"]


def test_objects_with_a_state_dict_are_loaded_in_place() -> None:
    model = Model()
    state = State(model=model)
    model.weights += 3
    state.restore()
    assert state.model is model
    assert model.weights.tolist() == [0, 0]


@pytest.mark.dear
def test_models_and_optimizers_of_pytorch_go_back_to_the_last_commit() -> None:
    torch = pytest.importorskip("torch")
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(4, 3)).square().sum().backward()
        optimizer.step()

    state = State(model=model, optimizer=optimizer, half=torch.ones(2, dtype=torch.bfloat16), epoch=0)
    step()
    state.epoch = 1
    state.commit()
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    step()
    after = [parameter.detach().clone() for parameter in model.parameters()]
    state.half.add_(3)
    state.restore()
    assert state.model is model
    assert state.epoch == 1
    assert all(map(torch.equal, model.parameters(), weights))
    assert torch.equal(state.half, torch.ones(2, dtype=torch.bfloat16))
    step()  # moments and running means are those of the commit, too
    assert all(map(torch.equal, model.parameters(), after))


@pytest.mark.parametrize("name", ["commit", "_saved", "restore"])
def test_names_that_a_state_has_itself_are_refused(name: str) -> None:
    with pytest.raises(sw.OptionError, match=name):
        State(**{name: 1})


@pytest.mark.parametrize(
    "value",
    [
        {"a": [np.arange(3), 2.5, "text", None], "b": (True, b"x", {3: 4})},
        optax.adam(1e-3).init({"w": jnp.ones((2, 3), jnp.bfloat16)}),
        jax.random.key(3),
        jnp.arange(4, dtype=jnp.int8),
        [],
        None,
    ],
    ids=["containers", "optax", "key", "int8", "empty", "none"],
)
def test_a_copy_is_the_same_at_the_other_end_of_the_wire(value) -> None:
    saved = host_copies.copy_to_host(value)
    received = host_copies.unpack(loads(dumps(host_copies.pack(saved, "value"))), saved, "value")
    back = host_copies.restore(received, value)
    assert jax.tree.structure(back) == jax.tree.structure(value)
    for ours, theirs in zip(jax.tree.leaves(back), jax.tree.leaves(value), strict=True):
        assert type(ours) is type(theirs)
        assert jnp.array_equal(ours, theirs) if isinstance(theirs, jax.Array) else np.array_equal(ours, theirs)


def test_structures_that_differ_are_an_error_unless_they_travel() -> None:
    saved = host_copies.pack(host_copies.copy_to_host(optax.adam(1.0).init(jnp.ones(2))), "state.opt")
    with pytest.raises(sw.CollectiveError, match="differ in structure"):
        host_copies.unpack(saved, host_copies.copy_to_host(optax.sgd(1.0).init(jnp.ones(2))), "state.opt")
    longer = host_copies.pack(host_copies.copy_to_host([1, 2, {"a": 3}]), "state.list")
    assert host_copies.restore(host_copies.unpack(longer, host_copies.copy_to_host([]), ""), []) == [1, 2, {"a": 3}]


def test_what_cannot_be_sent_is_named() -> None:
    with pytest.raises(sw.errors.ObjectTypeError) as caught:
        host_copies.pack(host_copies.copy_to_host({"f": object()}), "state.path")
    assert caught.value.where == "state.path"
    with pytest.raises(sw.errors.ObjectTypeError, match="sorted"):
        State(table={"a": 1, 2: 3})


# ---- sampler ---------------------------------------------------------------------


class Ranks:
    """Stands for the job: how many ranks there are, and which one this is."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.place = (0, 1)
        monkeypatch.setattr(ElasticSampler, "_ranks", lambda sampler: self.place)


def test_each_example_is_taken_once_whoever_comes_and_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    job, taken = Ranks(monkeypatch), []
    for shuffle in (True, False):
        taken.clear()
        saved = {"epoch": 1, "processed_num": 0}
        for size, batches in ((3, 2), (2, 3), (4, 2), (1, 100)):
            samplers = []
            for rank in range(size):
                job.place = (rank, size)
                sampler = ElasticSampler(100, shuffle=shuffle, seed=5)
                sampler.load_state_dict(saved)
                own = list(sampler)
                assert len(own) == len(sampler)
                for batch in range(min(batches, len(own) // 4)):
                    taken += own[4 * batch : 4 * batch + 4]
                    sampler.record_batch(batch, 4)
                samplers.append(sampler)
            saved = samplers[0].state_dict()
            assert all(sampler.state_dict() == saved for sampler in samplers)
        assert sorted(taken) == list(range(100))


def test_ranks_get_as_many_examples_each_and_epochs_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    job, own = Ranks(monkeypatch), []
    for rank in range(3):
        job.place = (rank, 3)
        sampler = ElasticSampler(range(10))
        own.append(list(sampler))
        sampler.set_epoch(1)
        assert list(sampler) != own[-1]
    assert [len(part) for part in own] == [4, 4, 4]
    assert set().union(*own) == set(range(10))


# ---- without the launcher -----------------------------------------------------------


def test_without_the_launcher_run_is_a_typed_error() -> None:
    with pytest.raises(sw.LaunchError) as caught:
        ranks.elastic.run(lambda state: None)(State(step=0))
    assert "shardwright run --min-np" in caught.value.remedy


def test_horovods_names() -> None:
    import shardwright.horovod as hvd

    assert hvd.elastic.run is ranks.elastic.run
    assert all(hasattr(hvd.elastic, name) for name in hvd.elastic.__all__)


# ---- real jobs -------------------------------------------------------------------


STEPS = 16


def check(job: ElasticJob, steps: int = STEPS) -> None:
    """The job ends well, and every rank of its last generation has the losses of one undisturbed process."""
    code, losses = job.finish()
    assert code == 0, "\n".join(job.log[-40:])
    _, size = max((int(line.words[0]), int(line.words[2])) for line in job.lines if line.kind == "up")
    assert len(losses) == size
    assert np.abs(np.array(losses) - np.array(curve(steps))).max() < 1e-5


@pytest.mark.cluster
@pytest.mark.parametrize(("victim", "program"), [(2, ()), (0, ("--jit",))])
def test_a_killed_rank_costs_no_more_than_seconds(victim: int, program: tuple[str, ...]) -> None:
    with ElasticJob(
        "--min-np", "2", "--max-np", "3", "--host-failures", "9", program=(str(STEPS), "0.1", *program)
    ) as job:
        doomed = job.wait_for("step", "0", str(victim), "3", "4")
        killed_s = time.time()
        os.kill(doomed.pid, signal.SIGKILL)
        up = job.wait_for("up", "1")
        assert up.at_s - killed_s < 5
        assert int(up.words[3]) >= 3  # nothing but the last step was lost
        assert job.wait_for("step", "1").at_s - up.at_s < 15  # XLA compiles the step anew
        check(job)


@pytest.mark.cluster
def test_a_hung_rank_is_ended_after_the_timeout_and_a_new_one_comes(tmp_path: Path) -> None:
    hosts, steps, hurry = hosts_file(tmp_path, 2), 80, tmp_path / "hurry"  # a new rank may take long to start
    with ElasticJob(
        "--min-np", "2", "--max-np", "3", "--hosts-file", str(hosts), "--hang-timeout", "4", "--host-failures", "9",
        program=(str(steps), "0.3", "--hurry", str(hurry)),
    ) as job:  # fmt: skip
        job.wait_for("step", "0", "0", "2", "2")
        hosts_file(tmp_path, 3)
        grown = job.wait_for("up", "1")
        assert grown.words[2] == "3"
        doomed = job.wait_for("step", "1", "1")
        hung_s = time.time()
        os.kill(doomed.pid, signal.SIGSTOP)
        assert job.wait_for("up", "2").at_s - hung_s < 15
        hurry.touch()
        check(job, steps)


@pytest.mark.cluster
def test_a_rank_that_never_calls_is_ended_as_stalled() -> None:
    with ElasticJob(
        "--min-np", "1", "--max-np", "2", "--stall-warning", "2", "--stall-shutdown", "4", "--host-failures", "9",
        program=(str(STEPS), "0.05", "--sleep", "1", "3", "1000"),
    ) as job:  # fmt: skip
        job.wait_for("up", "1")
        check(job)
        text = "\n".join(job.log)
        assert "rank 1 has not called allreduce sum 'gradients'" in text
        assert "rank 1 of generation 0 on localhost has not called allreduce sum 'gradients'" in text


@pytest.mark.cluster
def test_a_rank_that_no_error_reaches_starts_anew_with_its_state(tmp_path: Path) -> None:
    """Rank 0 waits for its neighbours, who live but do not call: nothing in XLA tells it that rank 2 is gone."""
    begun = tmp_path / "begun"
    busy = ("--wait", "1", "3", str(begun), "--wait", "3", "3", str(begun))
    with ElasticJob(
        "--min-np", "3", "--max-np", "4", "--host-failures", "1",
        program=(str(STEPS), "0.05", *busy, "--die", "2", "3"),
    ) as job:  # fmt: skip
        first = job.wait_for("up", "0", "0")
        while job.wait_for("begin").pid != first.pid:
            pass
        begun.touch()
        check(job)
        assert [line.kind for line in job.lines if line.pid == first.pid and line.kind in ("begin", "up")] == [
            "begin", "up", "begin", "up",
        ]  # fmt: skip
        assert "starts anew, with the last commit" in "\n".join(job.log)


@pytest.mark.cluster
def test_plain_jobs_are_told_to_use_the_elastic_launcher() -> None:
    (done,) = run_ranks("tests.ranks.elastic_training", 1, "2", "0")
    assert done.returncode == 1
    assert "shardwright run --min-np" in done.stdout
