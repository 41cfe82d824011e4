"""Scripts of many kinds on servers, as eager PyTorch: losses and all tensors of the module."""

from __future__ import annotations

from typing import Any

import pytest

import shardwright as sw
from tests.torch_frontend import (
    scripts_of_forms,
    scripts_of_models,
    scripts_of_optimizers,
    scripts_of_sequences,
    scripts_of_training,
)
from tests.torch_frontend.comparison import relative
from tests.torch_frontend.scripts import SCRIPTS, train_here, train_on_servers

#: They fill the table.
MODULES = (scripts_of_forms, scripts_of_models, scripts_of_optimizers, scripts_of_sequences, scripts_of_training)

#: Scripts that are run in the quick tests.
QUICK = (
    "vae", "hf_detr_loss_nonzero", "ppo_step", "gnn_index_add", "moe_dynamic", "flex_attention",
    "opt_python_step_counter", "opt_schedulefree_like", "opt_adafactor_torch", "weight_norm_parametrize",
    "tensor_hooks_grad", "compiled_inner", "fake_quantize_of_torch", "higher_order_cond_scan",
)  # fmt: skip

#: Scripts that cannot be a program, by what is refused; each with what is said of it.
REFUSED = {
    "nested_jagged": "nested",
    "nested_of_a_list": "cannot be traced",
}


#: Scripts whose first dimension, of time, is none that a batch is split in.
OF_TIME = ("gru_bidirectional_2layer",)

#: What is forced on scripts that do not take all.
FORCED: dict[str, tuple[Any, ...]] = {"gru_bidirectional_2layer": (None,), "gru_of_odd_sizes": (None, "data")}


@pytest.mark.parametrize(
    ("name", "force"),
    [
        pytest.param(name, force, marks=() if name in QUICK and force is None else pytest.mark.dear)
        for name in SCRIPTS
        if name not in REFUSED
        for force in FORCED.get(name, (None, "data", "fsdp"))
    ],
)
def test_a_script_trains_as_eagerly(name: str, force: Any, session: sw.Session) -> None:
    expected, expected_state = train_here(SCRIPTS[name]())
    losses, state = train_on_servers(session, SCRIPTS[name](), **({"force": force} if force else {}))
    assert relative(losses, expected) < 1e-5
    assert state.keys() == expected_state.keys()
    for key, value in expected_state.items():
        assert (state[key] - value).abs().max() <= 1e-5 * max(1.0, value.abs().max().item()), key


@pytest.mark.parametrize("name", OF_TIME)
def test_a_batch_that_devices_do_not_divide_is_named(name: str, session: sw.Session) -> None:
    with pytest.raises(sw.errors.PlanError, match="splits the batch over 4 devices") as caught:
        train_on_servers(session, SCRIPTS[name](), force="fsdp")
    assert caught.value.remedy


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_program_does_is_refused_with_a_remedy(name: str, session: sw.Session) -> None:
    with pytest.raises(sw.ShardwrightError, match=REFUSED[name]) as caught:
        train_on_servers(session, SCRIPTS[name]())
    assert caught.value.remedy
