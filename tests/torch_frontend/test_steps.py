"""What steps of torch modules refuse, and how their state travels."""

from __future__ import annotations

import copy
import subprocess
import sys
from typing import Any

import jax
import numpy as np
import pytest
import torch
from torch.nn import functional as F

import shardwright as sw
import shardwright.torch as swt
from tests.snippets.blocks import ROOT, blocks_of
from tests.torch_frontend.comparison import adamw, distance, sgd, train_eagerly
from tests.torch_frontend.models import GPT, floats, ids, token_loss


def small() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.LayerNorm(16), torch.nn.Linear(16, 4))


def class_loss(model: Any, x: Any, y: Any) -> Any:
    return F.cross_entropy(model(x), y)


X, Y = floats(8, 8), ids(8, below=4)


# ---- state ---------------------------------------------------------------------------------------


def test_state_goes_to_plain_torch_and_back(session: sw.Session) -> None:
    """Two steps on the servers, two here, two on the servers: as six here."""
    batches = [(floats(8, 8, seed=n), ids(8, below=4, seed=n)) for n in range(6)]
    eager = small()
    optimizer = torch.optim.Adagrad(eager.parameters(), 0.1, initial_accumulator_value=0.1)
    train_eagerly(eager, optimizer, class_loss, batches)

    def fresh() -> tuple[Any, Any]:
        model = small()
        return model, torch.optim.Adagrad(model.parameters(), 0.1, initial_accumulator_value=0.1)

    model, optimizer = fresh()
    step = swt.parallelize(session, model, optimizer, class_loss)
    for batch in batches[:2]:
        step(*batch)
    state = step.state_dict()
    plain, plain_optimizer = fresh()
    plain.load_state_dict(state["model"])
    plain_optimizer.load_state_dict(state["optimizer"])
    train_eagerly(plain, plain_optimizer, class_loss, batches[2:4])
    step.load_state_dict({"model": plain.state_dict(), "optimizer": plain_optimizer.state_dict()})
    for batch in batches[4:]:
        step(*batch)
    step.sync()
    assert distance(model.state_dict(), eager.state_dict()) < 1e-5


def test_checkpoints_of_the_servers(session: sw.Session, tmp_path: Any) -> None:
    model = small()
    step = swt.parallelize(session, model, adamw(model), class_loss)
    step(X, Y)
    step.save(tmp_path / "run").wait()
    after = step(X, Y).item()
    step(X, Y)
    step.restore(tmp_path / "run")
    assert step(X, Y).item() == after


def test_a_module_on_meta_is_born_on_the_servers(session: sw.Session) -> None:
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 4))
    step = swt.parallelize(session, model, sgd(model), class_loss)
    losses = [step(floats(8, 64), Y).item() for _ in range(5)]
    assert losses[-1] < losses[0]
    step.sync()
    weight = model[0].weight
    assert not weight.is_meta
    assert weight.abs().max().item() <= 1 / 8 + 0.2  # uniform within 1/√64, and five small steps
    assert weight.std().item() == pytest.approx(1 / 8 / 3**0.5, rel=0.05)


def test_a_module_on_meta_without_an_initializer_is_refused(session: sw.Session) -> None:
    class Bare(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.empty(8, 4))

        def forward(self, x: Any) -> Any:
            return x @ self.w

    with torch.device("meta"):
        model = Bare()
    with pytest.raises(sw.ArrayError, match=r"model\.w .*meta") as caught:
        swt.parallelize(session, model, sgd(model), class_loss)(X, Y)
    assert "init=" in caught.value.remedy
    step = swt.parallelize(session, model, sgd(model), class_loss, init=lambda model: model.w.fill_(0.5))
    wanted = F.cross_entropy(X @ torch.full((8, 4), 0.5), Y).item()
    assert step(X, Y).item() == pytest.approx(wanted, rel=1e-5)


def test_lowering_takes_types_only(session: sw.Session) -> None:
    with torch.device("meta"):
        model = small()
        x = torch.empty(8, 8)
        y = torch.empty(8, dtype=torch.int64)
    program = swt.parallelize(session, model, adamw(model), class_loss).lower(x, y)
    kinds = {argument.name: argument.type_text for argument in program.arguments}
    assert kinds["y"] == "s64[8]"
    assert kinds["optimizer.exp_avg.0.weight"] == "f32[16,8]"
    updated = {program.arguments[number].name for number in program.aliases.values()}
    assert {name for name in kinds if name.startswith(("model.", "optimizer.exp", "optimizer.step"))} == updated


def test_what_is_exported_runs_without_servers(session: sw.Session, tmp_path: Any) -> None:
    model = small()
    step = swt.parallelize(session, model, adamw(model), class_loss)
    step(X, Y)
    step.export(tmp_path / "state.pt")
    step.export(tmp_path / "step.stablehlo", X, Y)
    wanted = step(X, Y).item()
    plain = small()
    saved = torch.load(tmp_path / "state.pt")
    plain.load_state_dict(saved["model"])
    assert class_loss(plain, X, Y).item() == pytest.approx(wanted, rel=1e-5)
    state = {f"model.{name}": value.numpy() for name, value in saved["model"].items()}
    names = [name for name, _ in plain.named_parameters()]
    for number, entries in saved["optimizer"]["state"].items():
        state |= {f"optimizer.{key}.{names[number]}": value.numpy() for key, value in entries.items()}
    state["random"] = saved["random"].numpy()
    with jax.enable_x64(True):
        exported = jax.export.deserialize(bytearray((tmp_path / "step.stablehlo").read_bytes()))
        changed, (loss,) = exported.call(state, {"x": X.numpy(), "y": Y.numpy(), "optimizer.lr": np.float64(1e-3)})
    assert float(loss) == pytest.approx(wanted, rel=1e-6)
    after = step.state_dict()["model"]
    for name, value in after.items():
        np.testing.assert_allclose(changed[f"model.{name}"], value, rtol=1e-5, atol=1e-7)
    with pytest.raises(sw.OptionError, match=r"\.onnx"):
        step.export(tmp_path / "step.onnx")


def test_safetensors_hold_tied_weights_once(session: sw.Session, tmp_path: Any) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    model = GPT(layers=1)
    step = swt.parallelize(session, model, sgd(model), token_loss)
    step.export(tmp_path / "model.safetensors")
    other = GPT(layers=1)
    safetensors.load_model(other, tmp_path / "model.safetensors")
    assert distance(other.state_dict(), model.state_dict()) == 0
    assert other.lm_head.weight is other.wte.weight


# ---- optimizers ----------------------------------------------------------------------------------


@pytest.mark.dear
@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, 0.1),
        lambda p: torch.optim.Adam(p, 0.01, amsgrad=True),
        lambda p: torch.optim.Adagrad(p, 0.01),
        lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.5, centered=True),
        lambda p: torch.optim.NAdam(p, 0.01),
        lambda p: torch.optim.RAdam(p, 0.01),
        lambda p: torch.optim.Rprop(p, 0.01),
        lambda p: torch.optim.Adadelta(p, 0.5),
        lambda p: torch.optim.Adamax(p, 0.01),
        lambda p: torch.optim.ASGD(p, 0.01),
    ],
    ids=["SGD", "Adam", "Adagrad", "RMSprop", "NAdam", "RAdam", "Rprop", "Adadelta", "Adamax", "ASGD"],
)
def test_optimizer(session: sw.Session, make: Any) -> None:
    """Six steps, so that RAdam comes to its adaptive form."""
    model = torch.nn.Linear(8, 4)
    eager = copy.deepcopy(model)
    batches = [(floats(8, 8, seed=n), ids(8, below=4, seed=n)) for n in range(6)]
    train_eagerly(eager, make(eager.parameters()), class_loss, batches)
    step = swt.parallelize(session, model, make(model.parameters()), class_loss)
    for batch in batches:
        step(*batch)
    step.sync()
    assert distance(model.state_dict(), eager.state_dict()) < 1e-4


# ---- refusals ------------------------------------------------------------------------------------


def test_a_compiled_module_is_refused(session: sw.Session) -> None:
    model = torch.compile(small())
    with pytest.raises(sw.errors.OptionError, match=r"torch\.compile") as caught:
        swt.parallelize(session, model, sgd(model), class_loss)
    assert "pass the module inside" in caught.value.remedy


def test_a_data_parallel_module_is_refused(session: sw.Session) -> None:
    model = torch.nn.DataParallel(small())
    with pytest.raises(sw.errors.OptionError, match="DataParallel") as caught:
        swt.parallelize(session, model, sgd(model), class_loss)
    assert "pass the module inside" in caught.value.remedy


def test_an_optimizer_of_another_model_is_refused(session: sw.Session) -> None:
    with pytest.raises(sw.errors.OptionError, match="the model does not have"):
        swt.parallelize(session, small(), sgd(small()), class_loss)(X, Y)


def test_a_decision_by_a_value_is_refused_with_its_line(session: sw.Session) -> None:
    def loss(model: Any, x: Any, y: Any) -> Any:
        value = class_loss(model, x, y)
        if value > 1:
            value = value * 2
        return value

    model = small()
    with pytest.raises(sw.UnsupportedProgramError, match="only the servers know") as caught:
        swt.parallelize(session, model, sgd(model), loss)(X, Y)
    assert "test_steps.py" in caught.value.where


def test_a_size_that_depends_on_values_is_refused(session: sw.Session) -> None:
    model = small()
    step = swt.parallelize(session, model, sgd(model), lambda model, x, y: class_loss(model, x, y.unique(dim=0)))
    with pytest.raises(sw.UnsupportedProgramError, match="size depends on values"):
        step(X, Y)


def test_missing_operators_are_named_with_their_modules(session: sw.Session) -> None:
    class Odd(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return torch.special.bessel_j0(x) + torch.special.airy_ai(x)

    model = torch.nn.Sequential(torch.nn.Linear(8, 4), Odd())
    with pytest.raises(sw.UnsupportedProgramError) as caught:
        swt.parallelize(
            session, model, sgd(model), lambda model, x, y: class_loss(model[:1], x, y) + model(x).sum().detach()
        )(X, Y)
    assert "special_airy_ai" in caught.value.message
    assert "1 (" in caught.value.message
    assert "test_steps.py" in caught.value.message


def test_a_loss_that_is_no_number_is_refused(session: sw.Session) -> None:
    model = small()
    with pytest.raises(sw.ArgumentError, match=r"the loss is of shape \[8, 4\]"):
        swt.parallelize(session, model, sgd(model), lambda model, x: model(x))(X)


@pytest.mark.parametrize(
    ("call", "error", "remedy"),
    [
        (
            lambda s, m: swt.parallelize(s, m, sgd(m), lambda x, y: class_loss(m, x, y))(X, Y),
            sw.ArgumentError,
            "model, x",
        ),
        (lambda s, m: swt.parallelize(s, m, sgd(m), torch.nn.MSELoss())(X, Y), sw.ArgumentError, "model, x"),
        (lambda s, m: swt.parallelize(m, sgd(m), class_loss), sw.errors.OptionError, "pass it first"),
        (lambda s, m: swt.parallelize(s, m, sgd(m), class_loss)(X, Y[:3]), sw.ArgumentError, "this line"),
        (lambda s, m: swt.parallelize(s, m, sgd(m), class_loss)(X, X[:, 0]), sw.ArgumentError, "this line"),
        (lambda s, m: swt.parallelize(s, torch.jit.trace(m, X), sgd(m), class_loss), sw.errors.OptionError, "traced"),
    ],
    ids=["no model", "criterion", "no session", "wrong shape", "wrong dtype", "jit"],
)
def test_a_first_mistake_is_told_in_words(call: Any, error: Any, remedy: str, session: sw.Session) -> None:
    with pytest.raises(error) as caught:
        call(session, small())
    assert remedy in caught.value.remedy


def test_a_failed_trace_leaves_the_module_as_it_was(session: sw.Session) -> None:
    model = small()
    optimizer = sgd(model)
    parameters = list(model.parameters())
    with pytest.raises(ZeroDivisionError):
        swt.parallelize(session, model, optimizer, lambda model, x, y: 1 / 0)(X, Y)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert not optimizer.state


# ---- the page ------------------------------------------------------------------------------------


@pytest.mark.dear
def test_the_page_s_first_script_runs_as_it_stands(tmp_path: Any) -> None:
    script = next(block.text for block in blocks_of(ROOT / "docs" / "torch.md") if block.language == "python")
    assert len(script.splitlines()) == 8
    (tmp_path / "first.py").write_text(script)
    done = subprocess.run(
        [sys.executable, "first.py"], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    losses = [float(line.split()[1]) for line in done.stdout.splitlines()]
    assert losses[-1] < 0.6 * losses[0]


def test_the_page_s_examples_run(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _, first, second, third, buckets = (
        block.text for block in blocks_of(ROOT / "docs" / "torch.md") if block.language == "python"
    )
    names: dict[str, Any] = {}
    exec(first.replace("session.close()\n", "") + second, names)
    try:
        assert names["predict"](torch.randn(8, 64)).shape == (8,)
        assert names["step"](torch.randn(64, 64), ids(64, below=10)).item() > 0
        exec(third, names)
        assert names["step"](torch.randn(64, 64), ids(64, below=10)).item() > 0
        names["loss_fn"] = lambda model, input_ids, attention_mask, labels: model(input_ids).sum()
        exec(buckets, names)
        with pytest.raises(sw.ArgumentError, match="300 elements, and the largest bucket 256"):
            names["step"](input_ids=ids(2, 300), attention_mask=ids(2, 300), labels=ids(2, 300))
    finally:
        names["session"].close()
    state = torch.load(tmp_path / "state.pt")
    names["model"].load_state_dict(state["model"])
    names["optimizer"].load_state_dict(state["optimizer"])
