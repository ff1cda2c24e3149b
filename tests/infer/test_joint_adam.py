"""One Adam for all parameters: what Pyro's optimizer does with one for each."""

import pyro
import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from pyro_dp.infer.svi import optimizers
from pyro_dp.infer.svi.optimizers import PublicOptimizer, joint_adam

SETTINGS = {"lr": 0.1, "betas": (0.8, 0.95), "weight_decay": 0.01}


def moved(optim, joint, steps=4):
    """Parameters after some steps; the first step is Pyro's own."""
    torch.manual_seed(0)
    leaves = {name: torch.ones(size, requires_grad=True) for name, size in (("a", 3), ("b", 2))}
    for name, leaf in leaves.items():
        pyro.get_param_store()._params[name] = leaf
        pyro.get_param_store()._param_to_name[leaf] = name
    public = PublicOptimizer(optim)
    for step in range(steps):
        gradients = {name: torch.randn_like(leaf) for name, leaf in leaves.items()}
        if step == 2:
            gradients["b"] = None  # which then stays where it is
        with pytest.MonkeyPatch.context() as patch:
            if not joint:
                patch.setattr(optimizers, "joint_adam", lambda *own: False)
            public.step(leaves, gradients, rarely=False)
    return [leaf.detach() for leaf in leaves.values()], optim.get_state()


@pytest.mark.parametrize(
    "settings",
    [
        SETTINGS,
        SETTINGS | {"amsgrad": True},
        SETTINGS | {"maximize": True, "eps": 0.1},
        SETTINGS | {"decoupled_weight_decay": True},
    ],
)
def test_equals_one_optimizer_for_each(settings):
    runs = []
    for joint in (True, False):
        pyro.clear_param_store()
        runs.append(moved(pyro.optim.Adam(dict(settings)), joint))
    (one, state), (other, expected) = runs
    torch.testing.assert_close(one, other, rtol=1e-12, atol=0.0)
    for name in ("a", "b"):
        assert state[name]["param_groups"] == expected[name]["param_groups"]
        mine, theirs = state[name]["state"][0], expected[name]["state"][0]
        assert mine.keys() == theirs.keys()
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=0.0)


@pytest.mark.parametrize(
    "optim",
    [
        pyro.optim.ClippedAdam({"lr": 0.1}),
        pyro.optim.Adam({"lr": 0.1}, {"clip_norm": 1.0}),
        pyro.optim.ExponentialLR(
            {"optimizer": torch.optim.Adam, "optim_args": {"lr": 0.1}, "gamma": 0.9}
        ),
        pyro.optim.Adam(lambda name: {"lr": 0.1 if name == "a" else 0.2}),
    ],
)
def test_others_are_left_to_themselves(optim):
    moved(optim, joint=True)
    leaves = {str(i): leaf for i, leaf in enumerate(optim.optim_objs)}
    assert not joint_adam(optim, leaves, {name: torch.ones_like(x) for name, x in leaves.items()})


def test_optimizers_with_hooks_are_left_to_themselves():
    optim = pyro.optim.Adam({"lr": 0.1})
    moved(optim, joint=True)
    leaf, own = next(iter(optim.optim_objs.items()))
    assert joint_adam(optim, {"a": leaf}, {"a": torch.ones_like(leaf)})
    hook = own.register_step_post_hook(lambda *given: None)
    assert not joint_adam(optim, {"a": leaf}, {"a": torch.ones_like(leaf)})
    hook.remove()
    everywhere = register_optimizer_step_pre_hook(lambda *given: None)
    assert not joint_adam(optim, {"a": leaf}, {"a": torch.ones_like(leaf)})
    everywhere.remove()
